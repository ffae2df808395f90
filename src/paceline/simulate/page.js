// The controls, the address, and what is shown of an answer.

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const isMeasured = data.mode === "measured";
  const reckon = answer.over(data);
  const element = (id) => document.getElementById(id);
  const escaped = (words) => words.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);

  const decades = (low, high, marks = [1, 1.5, 2, 3, 4, 5, 6, 8]) => {
    const found = [];
    for (let power = 1e-6; power <= high; power *= 10) {
      for (const mark of marks) {
        const value = +(mark * power).toPrecision(6);
        if (value >= low && value <= high) found.push(value);
      }
    }
    return found;
  };
  const steps = (low, high, step) => Array.from({ length: Math.round((high - low) / step) + 1 }, (_, at) => +(low + at * step).toFixed(6));
  const doublings = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024];
  const percent = (value) => `${+(100 * value).toFixed(1)}\u00a0%`;
  const tokens = (value) => `${charts.count(value)} tokens`;
  const seconds = (value) => (value ? charts.duration(value) : "none");
  const plainly = (value) => `${value}`;
  const mostRows = isMeasured ? data.table.rows[data.table.rows.length - 1] : 1024;

  /** Name, label, values that a slider stops at, and how a value reads. */
  const GROUPS = [
    ["Engine", [
      ["slots", "Batch: slots of an engine", doublings.filter((rows) => rows <= mostRows), plainly],
      ["engines", "Engines", doublings.filter((many) => many <= 64), plainly],
      ["kv", "Its caches hold", [...decades(1e4, 1e7), 0], (value) => (value ? tokens(value) : isMeasured ? "all there is" : "what fits")],
    ]],
    ["Drafter", [
      ["drafted", "Drafted tokens", steps(0, 16, 1), plainly],
      ["acceptance", "Acceptance, first token", steps(0, 1, 0.01), percent],
      ["fall", "Lost with each depth", steps(0, 0.5, 0.01), percent],
      ["fixed", "Drafting, a pass", [0, ...decades(1e-4, 0.5)], seconds],
      ["each", "Drafting, a position", [0, ...decades(1e-5, 0.1)], seconds],
      ["drift", "Acceptance lost a step", steps(0, 0.2, 0.005), percent],
      ["stale", "Steps since it was trained", [0, 1, 2, 3, 5, 8, 10, 15, 20, 30, 50, 75, 100], plainly],
    ]],
    ["Rollouts", [
      ["prompts", "Prompts of a step", doublings.filter((many) => many <= 256), plainly],
      ["siblings", "Answers to each", doublings.filter((many) => many <= 32), plainly],
      ["prompt", "Prompt", [1, ...decades(16, 32768, [1, 1.6, 2.56, 4, 6.4])].map(Math.round), tokens],
      ["mean", "Answer, mean", decades(16, 32768, [1, 1.25, 1.6, 2, 2.5, 3.2, 4, 5, 6.4, 8]), tokens],
      ["sigma", "Tail: deviation of log length", steps(0, 1.6, 0.05), (value) => value.toFixed(2)],
      ["longest", "Answer, at most", decades(64, 131072, [1, 1.5, 2, 3, 4, 6, 8]).map(Math.round), tokens],
    ]],
    ["Rest of the step", [
      ["train", "Training", [0, ...decades(0.1, 3600)], seconds],
      ["logprob", "Log-probabilities", [0, ...decades(0.1, 3600)], seconds],
      ["refit", "Weights and data", [0, ...decades(0.1, 3600)], seconds],
      ["drafter", "Training the drafter", [0, ...decades(0.1, 3600)], seconds],
      ["lag", "Rollouts may be behind", [0, 1, 2, 3, 4], (value) => (value ? `${value} ${value > 1 ? "steps" : "step"}` : "in turn")],
    ]],
  ];
  const CHOICES = [["model", "Model"], ["hardware", "GPU"], ["layout", "GPUs an engine"], ["precision", "Precision"]];
  const start = { ...data.start, ...(isMeasured ? {} : data.choice) };
  const stops = {};
  for (const [, sliders] of GROUPS) {
    for (const [name, , values] of sliders) {
      const given = typeof start[name] === "number" && !values.includes(start[name]) ? [...values, start[name]] : values;
      stops[name] = [...new Set(given)].sort((a, b) => (name === "kv" && (!a || !b) ? (a ? -1 : 1) : a - b));
    }
  }
  let state = { ...start };

  /** The values of a choice, with what is shown of each. */
  const options = (name) => ({
    model: data.models.map((each) => [each, each]),
    hardware: Object.keys(data.hardware).map((each) => [each, each]),
    layout: data.layouts.map((shown, at) => [`${at}`, shown]),
    precision: [["bf16", "bf16"], ["fp8", "fp8"]],
  })[name];

  /** The setting, or the nearest one that an engine can have: a model that the GPUs do not divide takes others. */
  function possible(wanted) {
    if (isMeasured || law.engineOf(data, wanted)) return wanted;
    const layouts = options("layout").map(([at]) => at).sort((a, b) => Math.abs(a - wanted.layout) - Math.abs(b - wanted.layout));
    for (const layout of layouts) {
      for (const precision of [wanted.precision, "bf16", "fp8"]) {
        const other = { ...wanted, layout, precision };
        if (law.engineOf(data, other)) return other;
      }
    }
    return state;
  }

  /** The setting of an address: what it does not name, or names wrongly, is as at the start. */
  function ofAddress(address) {
    const found = { ...start };
    for (const [name, words] of new URLSearchParams(address.replace(/^#/, ""))) {
      if (name === "drafted" && words === "best") found.drafted = "best";
      else if (Object.hasOwn(stops, name)) {
        const ends = stops[name].filter((value) => name !== "kv" || value);
        const value = Number(words);
        const isWhole = !["acceptance", "fall", "fixed", "each", "drift", "stale", "mean", "sigma", "train", "logprob", "refit", "drafter"].includes(name);
        if (words.trim() === "" || !Number.isFinite(value) || (isWhole && !Number.isInteger(value))) continue;
        if ((name === "kv" && value === 0) || (value >= ends[0] && value <= ends[ends.length - 1])) found[name] = value;
      } else if (!isMeasured && CHOICES.some(([each]) => each === name) && options(name).some(([value]) => value === words)) found[name] = words;
    }
    return possible(found);
  }

  function toAddress() {
    const changed = Object.keys(start).filter((name) => state[name] !== start[name]);
    const words = new URLSearchParams(changed.map((name) => [name, `${state[name]}`])).toString();
    const address = words ? `#${words}` : "";
    if (address !== location.hash) history.replaceState(null, "", address || location.pathname + location.search);
  }

  function build() {
    const slider = ([name, label]) =>
      `<div class="control"><label for="c-${name}">${label}<output id="o-${name}" for="c-${name}"></output></label>` +
      `<input type="range" id="c-${name}" name="${name}" min="0" max="${stops[name].length - 1}" step="1">` +
      (name === "drafted" ? '<label class="check"><input type="checkbox" id="c-best">the best length</label>' : "") + "</div>";
    const choice = ([name, label]) =>
      `<div class="control"><label for="c-${name}">${label}</label><select id="c-${name}" name="${name}">` +
      options(name).map(([value, shown]) => `<option value="${escaped(value)}">${escaped(shown)}</option>`).join("") + "</select></div>";
    const isSmall = window.innerWidth < 768;
    element("controls").innerHTML = GROUPS.map(([title, sliders], at) =>
      `<details ${!isSmall || at === 1 ? "open" : ""}><summary>${title}</summary>` +
      (title === "Engine" && !isMeasured ? CHOICES.map(choice).join("") : "") + sliders.map(slider).join("") + "</details>",
    ).join("") + '<button type="button" id="reset">Back to the start</button>';
  }

  /** The slider's place of a value: its own, or the nearest. */
  function placeOf(name, value) {
    const values = stops[name];
    const own = values.indexOf(value);
    if (own >= 0) return own;
    const far = (each) => Math.abs((each || Infinity) - value);
    return values.reduce((best, each, at) => (far(each) < far(values[best]) ? at : best), 0);
  }

  function showControls(found) {
    for (const [, sliders] of GROUPS) {
      for (const [name, , , shown] of sliders) {
        const value = name === "drafted" ? found.chosen : state[name];
        const input = element(`c-${name}`);
        const output = element(`o-${name}`);
        input.value = placeOf(name, value);
        input.setAttribute("aria-valuetext", shown(value));
        output.textContent = shown(value);
        output.classList.toggle("zero", value === 0 && name !== "acceptance");
      }
    }
    element("c-best").checked = state.drafted === "best";
    for (const [name] of isMeasured ? [] : CHOICES) {
      const select = element(`c-${name}`);
      select.value = state[name];
      for (const option of select.options) {
        const alone = name === "layout" || name === "precision";
        option.disabled = alone && !law.engineOf(data, { ...state, [name]: option.value });
      }
    }
  }

  function sourceOf() {
    if (isMeasured) return data.source;
    const shown = data.layouts[Number(state.layout)];
    return `roofline of ${state.model} on ${state.hardware}, ${shown === "1" ? "one GPU" : `${shown} GPUs an engine`.replace(/, (.*) GPUs/, " GPUs, $1 in")}, ${state.precision}`;
  }

  function commandOf() {
    const rates = law.rates({ ...state, drift: 0 }, data.bend, data.fade).map((rate) => +rate.toFixed(4));
    while (rates.length > 1 && rates[rates.length - 1] === rates[rates.length - 2]) rates.pop();
    const ms = (value) => +(1000 * value).toFixed(4);
    const layout = isMeasured ? "" : data.layouts[Number(state.layout)];
    const words = [
      "paceline simulate",
      isMeasured
        ? `--cost ${data.source.split(": ")[0]}`
        : `--model ${state.model} --hardware ${state.hardware} --tensor ${parseInt(layout, 10)}` +
          (layout.includes("over") ? ` --expert ${layout.split("over ")[1]}` : "") + ` --precision ${state.precision}`,
      `--prompts ${state.prompts} --siblings ${state.siblings} --prompt-tokens ${state.prompt}`,
      `--mean-tokens ${state.mean} --sigma ${state.sigma} --max-tokens ${state.longest}`,
      `--slots ${state.slots} --engines ${state.engines}` + (state.kv ? ` --kv-tokens ${state.kv}` : ""),
      `--acceptance ${rates.join(",")} --draft-ms ${ms(state.fixed)},${ms(state.each)}`,
    ];
    const phases = ["train", "logprob", "refit", "drafter"].filter((name) => state[name]).map((name) => `${name}=${state[name]}`);
    if (phases.length) words.push(`--phases ${phases.join(",")} --age-bound ${state.lag}`);
    return words.join(" \\\n  ");
  }

  function tilesOf(found) {
    const { steps: step } = found;
    const at = found.chosen;
    const speed = found.speedups[at];
    const mood = (value) => (value >= law.WORTH ? "good" : value < 0.995 ? "bad" : "");
    const tile = (label, value, more, kind = "") =>
      `<div class="tile"><div class="label">${label}</div><div class="value ${kind}">${value}</div><div class="more">${more}</div></div>`;
    const lasting = (phases) => step.seconds(phases, state.lag);
    const small = (words) => words.replace(/ ?(×|s|ms|min|h)$/, "<small> $1</small>");
    return [
      tile("Best draft", found.best ? `${found.best}<small> tokens</small>` : "off", `adaptive length ${charts.times(found.adaptive)}`),
      tile("Rollouts", small(charts.times(speed)), `${charts.duration(found.plainSeconds)} → ${charts.duration(found.draftedSeconds)}`, mood(speed)),
      tile("Steps", step.others ? small(charts.times(found.stepSpeedups[at])) : "–",
        step.others ? `${charts.duration(lasting(step.sides(1, 0)))} → ${charts.duration(lasting(step.sides(speed, at)))}` : "give the other phases", step.others ? mood(found.stepSpeedups[at]) : ""),
      tile("Tokens a forward", found.perForward[at].toFixed(2), at ? `drafting ${at}` : "without drafts"),
      tile("Rollouts' share", percent(step.share).replace("\u00a0%", "<small> %</small>"), step.others ? `of a plain step; at most ${charts.times(1 / (1 - step.share))}` : "no other phases"),
    ].join("");
  }

  function tableOf(found) {
    const hasSteps = found.steps.others > 0;
    const head = ["drafted", "tokens a forward", "rollouts, times as fast", ...(hasSteps ? ["steps, times as fast"] : [])];
    element("figures").querySelector("thead").innerHTML = `<tr>${head.map((each) => `<th scope="col">${each}</th>`).join("")}</tr>`;
    element("figures").querySelector("tbody").innerHTML = found.speedups.map((speedup, drafted) => {
      const cells = [drafted, found.perForward[drafted].toFixed(3), speedup.toFixed(3), ...(hasSteps ? [found.stepSpeedups[drafted].toFixed(3)] : [])];
      return `<tr${drafted === found.best ? ' class="best"' : ""}>${cells.map((each) => `<td>${each}</td>`).join("")}</tr>`;
    }).join("");
  }

  const colourOf = (name) => {
    const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  let colours = null;
  let widths = {};
  let heatMap = null;

  function draw(found) {
    colours = colours || { even: colourOf("--card"), better: colourOf("--teal"), worse: colourOf("--rose") };
    const put = (id, drawn, words) => {
      element(id).innerHTML = drawn;
      element(id).setAttribute("aria-label", words);
    };
    const at = found.chosen || found.quickest;
    put("by-length", charts.byLength(widths["by-length"], found), `Rollouts ${charts.times(found.speedups[at])} as fast with ${at} drafted tokens; the best length is ${found.best}.`);
    put("by-batch", charts.byBatch(widths["by-batch"], found, state), `Speedup of a full pass by requests: ${found.batches.map(([rows, faster]) => `${rows}: ${charts.times(faster[at])}`).join(", ")}.`);
    const [plain, drafted] = found.rows;
    put("rows", charts.rowsOverTime(widths.rows, found), `Plain decoding ends after ${charts.duration(plain.end)}, drafted after ${charts.duration(drafted.end)}.`);
    element("tails").textContent = ` Under a quarter of the slots are taken for ${percent(Math.round(100 * plain.tail) / 100)}` + (found.chosen ? ` and ${percent(Math.round(100 * drafted.tail) / 100)} of the time.` : " of the time.");
    put("phases", charts.phases(widths.phases, found), "Seconds of a step by phase, plain and drafted.");
    element("limit").textContent = found.steps.others
      ? ` Rollouts that took no time would leave the dashed part: ${charts.times(1 / (1 - found.steps.share))} as fast.`
      : " No other phases are given.";
    put("lags", charts.lags(widths.lags, found, state), "Seconds of a step by how far rollouts may be behind.");
    const holder = element("heat");
    const canvas = holder.querySelector("canvas");
    heatMap = charts.heat(canvas, widths.heat, found, state, colours);
    holder.querySelector(".over").innerHTML = heatMap.svg;
    const [left, top, wide, high] = heatMap.box;
    Object.assign(canvas.style, { left: `${left}px`, top: `${top}px`, width: `${wide}px`, height: `${high}px` });
    holder.setAttribute("aria-label", `Rollouts by draft length and acceptance; here ${charts.times(found.speedups[at])} as fast.`);
  }

  function show() {
    const found = reckon(state);
    const trouble = answer.trouble(data, state);
    const words = trouble || answer.verdict(found, state);
    if (element("verdict").textContent !== words) element("verdict").textContent = words;
    document.title = `${words.replace(/\.$/, "")} · paceline`;
    element("source").textContent = sourceOf();
    const caches = answer.cachesOf(data, state);
    element("memory").textContent = trouble
      ? ". Take more GPUs an engine, another GPU, or fp8. Figures are those of memory without end."
      : !isMeasured && !state.kv ? `; its memory holds ${charts.count(caches)} cached tokens` : "";
    element("memory").classList.toggle("warning", trouble !== "");
    element("tiles").innerHTML = tilesOf(found);
    document.body.classList.toggle("troubled", trouble !== "");
    for (const each of document.querySelectorAll(".with-steps")) each.hidden = !found.steps.others;
    showControls(found);
    draw(found);
    if (element("figures").open) tableOf(found);
    element("command").textContent = commandOf();
    window.paceline = { state, found, show };
  }

  let waits = false;
  function soon() {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => {
      waits = false;
      show();
    });
  }

  function measure() {
    for (const id of ["by-length", "heat", "by-batch", "rows", "phases", "lags"]) widths[id] = Math.max(240, Math.floor(element(id).clientWidth));
  }

  function listen() {
    const form = element("controls");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("input", ({ target }) => {
      if (target.id === "c-best") state = { ...state, drafted: target.checked ? "best" : Number(stops.drafted[element("c-drafted").value]) };
      else if (target.tagName === "SELECT") state = possible({ ...state, [target.name]: target.value });
      else if (target.name) state = { ...state, [target.name]: stops[target.name][Number(target.value)] };
      soon();
    });
    form.addEventListener("change", toAddress);
    element("reset").addEventListener("click", () => {
      state = { ...start };
      toAddress();
      soon();
    });
    element("heat").addEventListener("click", (event) => {
      const place = element("heat").getBoundingClientRect();
      const [drafted, acceptance] = heatMap.toState(event.clientX - place.left, event.clientY - place.top);
      state = { ...state, drafted, acceptance };
      toAddress();
      soon();
    });
    element("figures").addEventListener("toggle", soon);
    window.addEventListener("hashchange", () => {
      state = ofAddress(location.hash);
      soon();
    });
    window.addEventListener("resize", () => {
      measure();
      soon();
    });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      colours = null;
      soon();
    });
  }

  element("phase-keys").innerHTML = charts.PHASES.map(([name, shown]) => `<span class="named"><i class="key ${name}"></i>${shown}</span>`).join(" ");
  element("honest").textContent = isMeasured
    ? `Passes were measured (${data.source}). The page offers no other engine, and nothing here is reckoned from data sheets. Drafting takes what is set.`
    : "Passes are analytic: reckoned from the model's sizes and the GPU's data sheet, never measured. Real engines are slower; speedups are nearer than seconds.";
  if (data.trace) element("honest").textContent += ` Lengths follow a lognormal law with the mean and the deviation of ${data.trace}; the command simulates those that were recorded.`;
  build();
  state = ofAddress(location.hash);
  listen();
  measure();
  show();
})();
