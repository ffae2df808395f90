// Pictures as SVG text, drawn for the pixels that they get; colours are the style sheet's.

const charts = (() => {
  const times = (value) => `${value.toFixed(value < 9.95 ? 2 : 1)}×`;

  /** Seconds as people say them. */
  function duration(seconds) {
    if (seconds >= 7200) return `${(seconds / 3600).toFixed(1)} h`;
    if (seconds >= 600) return `${(seconds / 60).toFixed(0)} min`;
    if (seconds >= 99.5) return `${seconds.toFixed(0)} s`;
    if (seconds >= 0.995) return `${seconds.toFixed(1)} s`;
    return `${(1000 * seconds).toFixed(seconds < 0.00995 ? 2 : 0)} ms`;
  }

  const count = (value) => (value >= 1e6 ? `${+(value / 1e6).toFixed(1)}M` : value >= 1e4 ? `${+(value / 1e3).toFixed(1)}k` : `${+value.toFixed(2)}`);

  /** About ``most`` round numbers from low to high. */
  function ticks(low, high, most) {
    const rough = (high - low) / most;
    const power = Math.pow(10, Math.floor(Math.log10(rough)));
    const step = [1, 2, 2.5, 5, 10].map((by) => by * power).find((by) => by >= rough * 0.999);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + 1e-9 * step; at++) found.push(at * step);
    return found;
  }

  const text = (x, y, words, kind = "", anchor = "middle") =>
    `<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" class="${kind}" text-anchor="${anchor}">${words}</text>`;
  const rule = (x1, y1, x2, y2, kind) =>
    `<line x1="${x1.toFixed(1)}" y1="${y1.toFixed(1)}" x2="${x2.toFixed(1)}" y2="${y2.toFixed(1)}" class="${kind}"/>`;
  const path = (points, kind) =>
    `<path d="M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}" class="${kind}"/>`;
  const dot = (x, y, kind, size = 4.5) => `<circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="${size}" class="${kind}"/>`;
  const box = (x, y, width, height, kind) =>
    `<rect x="${x.toFixed(1)}" y="${y.toFixed(1)}" width="${Math.max(0, width).toFixed(1)}" height="${Math.max(0, height).toFixed(1)}" class="${kind}"/>`;
  const svg = (width, height, inner) => `<svg viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" aria-hidden="true">${inner}</svg>`;

  const HEIGHT = 264;
  const LEFT = 38;
  const RIGHT = 12;
  const BOTTOM = 34;
  const TOP = 12;

  /** Axes of a picture: functions to pixels, and the marks. */
  function frame(width, height, x, y, names) {
    const toX = (value) => LEFT + ((x.to(value) - x.to(x.low)) / (x.to(x.high) - x.to(x.low))) * (width - LEFT - RIGHT);
    const toY = (value) => height - BOTTOM - ((value - y.low) / (y.high - y.low)) * (height - BOTTOM - TOP);
    const marks = [
      ...y.ticks.map((value) => rule(LEFT, toY(value), width - RIGHT, toY(value), value === 1 && y.even ? "even" : "grid") + text(LEFT - 6, toY(value) + 4, y.shown(value), "tick", "end")),
      ...x.ticks.map((value) => text(toX(value), height - BOTTOM + 17, x.shown(value), "tick")),
      text((LEFT + width - RIGHT) / 2, height - 2, names, "axis"),
    ];
    return { toX, toY, marks: marks.join("") };
  }

  const same = (value) => value;
  const roof = (values) => Math.max(1.25, ...values.filter(Number.isFinite)) * 1.06;
  const speedAxis = (high) => {
    const found = ticks(0, high, 5);
    return { low: 0, high, ticks: found.includes(1) ? found : [...found, 1].sort((a, b) => a - b).filter((value) => value === 1 || Math.abs(value - 1) > high / 14), shown: (value) => `${+value.toFixed(2)}×`, even: true };
  };

  /** Speedup by draft length: rollouts, the bound that tokens a forward are, and steps where there are other phases. */
  function byLength(width, found) {
    const height = HEIGHT;
    const lengths = found.speedups.map((_, drafted) => drafted).slice(1);
    const most = Math.min(roof(found.perForward), 1.9 * roof([...found.speedups, found.adaptive]));
    const f = frame(width, height, { low: 0.5, high: 16.5, to: same, ticks: lengths.filter((at) => width > 420 || at % 2), shown: same }, speedAxis(most), "drafted tokens");
    const of = (values) => lengths.map((at) => [f.toX(at), f.toY(values[at])]);
    const bound = of(found.perForward).filter(([, y]) => y >= TOP - 6);
    const at = found.chosen || found.quickest;
    const hasSteps = found.steps.others > 0;
    return svg(width, height, [
      f.marks,
      path(bound, "bound"),
      rule(LEFT, f.toY(found.adaptive), width - RIGHT, f.toY(found.adaptive), "adaptive"),
      hasSteps ? path(of(found.stepSpeedups), "line steps") : "",
      path(of(found.speedups), "line drafted"),
      hasSteps ? dot(f.toX(at), f.toY(found.stepSpeedups[at]), "steps") : "",
      dot(f.toX(at), f.toY(found.speedups[at]), "drafted"),
      text(Math.min(Math.max(f.toX(at), LEFT + 26), width - 30), f.toY(found.speedups[at]) - 10, `${times(found.speedups[at])}`, "value"),
    ].join(""));
  }

  /** Speedup of one full pass by its rows: the chosen length, and the best one of each. */
  function byBatch(width, found, state) {
    const height = HEIGHT;
    const rows = found.batches.map(([at]) => at);
    const at = found.chosen || found.quickest;
    const own = found.batches.map(([, faster]) => faster[at]);
    const best = found.batches.map(([, faster]) => Math.max(...faster));
    const lengths = found.batches.map(([, faster]) => faster.indexOf(Math.max(...faster)));
    const high = Math.max(2, rows[rows.length - 1]);
    const shown = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024].filter((each) => each <= high && (width > 420 || Math.log2(each) % 2 === 0));
    const f = frame(width, height, { low: 1, high, to: Math.log2, ticks: shown, shown: same }, speedAxis(roof(best)), "requests in a pass");
    const here = rows.indexOf(state.slots);
    return svg(width, height, [
      f.marks,
      here >= 0 ? rule(f.toX(state.slots), TOP, f.toX(state.slots), height - BOTTOM, "here") : "",
      path(best.map((value, i) => [f.toX(rows[i]), f.toY(value)]), "adaptive"),
      path(own.map((value, i) => [f.toX(rows[i]), f.toY(value)]), "line drafted"),
      ...best.map((value, i) => (shown.includes(rows[i]) ? text(f.toX(rows[i]), f.toY(value) - 7, lengths[i], "hint") : "")),
      here >= 0 ? dot(f.toX(state.slots), f.toY(own[here]), "drafted") : "",
    ].join(""));
  }

  /** Requests in flight over the seconds of the rollout, plain beside drafted. */
  function rowsOverTime(width, found) {
    const height = HEIGHT;
    const [plain, drafted] = found.rows;
    const end = Math.max(plain.end, drafted.end);
    const most = Math.max(1, ...plain.points.map(([, rows]) => rows), ...drafted.points.map(([, rows]) => rows));
    const unit = end >= 7200 ? [3600, "hours"] : end >= 600 ? [60, "minutes"] : end < 1 ? [0.001, "milliseconds"] : [1, "seconds"];
    const f = frame(width, height,
      { low: 0, high: end, to: same, ticks: ticks(0, end / unit[0], width > 420 ? 7 : 4).map((value) => value * unit[0]), shown: (value) => count(value / unit[0]) },
      { low: 0, high: most * 1.06, ticks: ticks(0, most * 1.06, 5), shown: count }, unit[1]);
    const steps = (one) => {
      const points = [];
      let before = 0;
      for (const [at, rows] of one.points) {
        points.push([f.toX(at), f.toY(before)], [f.toX(at), f.toY(rows)]);
        before = rows;
      }
      return [...points, [f.toX(one.end), f.toY(0)]];
    };
    return svg(width, height, [
      path([...steps(plain), [f.toX(0), f.toY(0)]], "area flat"),
      found.chosen ? path([...steps(drafted), [f.toX(0), f.toY(0)]], "area drafted") : "",
      f.marks,
      path(steps(plain), "line flat"),
      found.chosen ? path(steps(drafted), "line drafted") : "",
    ].join(""));
  }

  const PHASES = [["generation", "generation"], ["refit", "weights, data"], ["logprob", "log-probabilities"], ["train", "training"], ["drafter", "drafter"]];

  /** A step's phases in turn, plain and drafted, with what would be left if generation took no time. */
  function phases(width, found) {
    const bar = 34;
    const height = 150;
    const left = 62;
    const rows = [["plain", found.steps.sides(1, 0)], ["drafted", found.steps.sides(found.speedups[found.chosen], found.chosen)]];
    const total = (phase) => PHASES.reduce((sum, [name]) => sum + phase[name], 0);
    const most = Math.max(...rows.map(([, phase]) => total(phase)));
    const toX = (value) => left + (value / most) * (width - left - 64);
    const limit = found.steps.others;
    const parts = rows.map(([name, phase], i) => {
      const y = 24 + i * (bar + 18);
      let from = 0;
      const pieces = PHASES.map(([key]) => {
        const piece = box(toX(from), y, toX(from + phase[key]) - toX(from), bar, `phase ${key}`);
        from += phase[key];
        return piece;
      });
      return text(left - 8, y + bar / 2 + 4, name, "label", "end") + pieces.join("") + text(toX(from) + 6, y + bar / 2 + 4, duration(from), "value", "start");
    });
    const mark = limit ? rule(toX(limit), 12, toX(limit), 24 + 2 * bar + 18 + 12, "limit") : "";
    return svg(width, height, parts.join("") + mark);
  }

  /** Seconds of a step by the bound on age, plain and drafted. */
  function lags(width, found, state) {
    const height = 164;
    const { lags: bounds, seconds, sides } = found.steps;
    const values = bounds.map((lag) => [seconds(sides(1, 0), lag), seconds(sides(found.speedups[found.chosen], found.chosen), lag)]);
    const most = Math.max(...values.flat());
    const slot = (width - 16) / bounds.length;
    const thick = Math.min(34, slot * 0.36);
    const toY = (value) => height - 38 - (value / most) * (height - 64);
    const wide = slot > 100;
    return svg(width, height, bounds.map((lag, i) => {
      const middle = 8 + slot * (i + 0.5);
      const [plain, drafted] = values[i];
      const words = lag ? `${lag}` : "in turn";
      return [
        lag === state.lag ? box(middle - slot / 2 + 2, 2, slot - 4, height - 22, "band") : "",
        box(middle - thick - 1.5, toY(plain), thick, height - 38 - toY(plain), "bar flat"),
        box(middle + 1.5, toY(drafted), thick, height - 38 - toY(drafted), "bar drafted"),
        text(middle - thick / 2 - 1.5, toY(plain) - 5, wide ? duration(plain) : count(Math.round(plain)), "hint"),
        text(middle + thick / 2 + 1.5, toY(drafted) - 5, wide ? duration(drafted) : count(Math.round(drafted)), "hint"),
        text(middle, height - 24, words, "tick"),
      ].join("");
    }).join("") + text(width / 2, height - 4, "steps that rollouts may be behind", "axis"));
  }

  /** Where a broken line through (columns, levels) crosses ``level``: points of the contour, by column pairs. */
  function contour(map, level, toX, toY) {
    const lines = [];
    let points = [];
    for (let column = 0; column < map[0].length; column++) {
      let at = null;
      for (let row = 1; row < map.length && at === null; row++) {
        const below = map[row - 1][column];
        const above = map[row][column];
        if (below < level && above >= level) at = row - 1 + (level - below) / (above - below);
      }
      if (at === null) {
        if (points.length) lines.push(points);
        points = [];
      } else points.push([toX(column + 1), toY(at / (map.length - 1))]);
    }
    if (points.length) lines.push(points);
    return lines;
  }

  /** Speedup over draft length and acceptance: cells on the canvas, axes, the break-even line and the cross above. */
  function heat(canvas, width, found, state, colours) {
    const height = HEIGHT;
    const f = frame(width, height,
      { low: 0.5, high: 16.5, to: same, ticks: found.map[0].map((_, i) => i + 1).filter((at) => width > 420 || at % 2), shown: same },
      { low: 0, high: 1, ticks: [0, 0.2, 0.4, 0.6, 0.8, 1], shown: (value) => `${Math.round(100 * value)}%` }, "drafted tokens");
    const rows = found.map.length;
    canvas.width = 16;
    canvas.height = rows;
    const context = canvas.getContext("2d");
    const image = context.createImageData(16, rows);
    const top = Math.log2(Math.max(2, ...found.map.flat()));
    found.map.forEach((line, row) => line.forEach((value, column) => {
      const place = 4 * ((rows - 1 - row) * 16 + column);
      const level = Math.max(-1, Math.min(1, Math.log2(value) / (value < 1 ? 2.5 : top)));
      const [from, to] = [colours.even, level < 0 ? colours.worse : colours.better];
      const share = Math.pow(Math.abs(level), 0.8);
      for (let i = 0; i < 3; i++) image.data[place + i] = from[i] + (to[i] - from[i]) * share;
      image.data[place + 3] = 255;
    }));
    context.putImageData(image, 0, 0);
    const levels = [1.5, 2, 3, 4, 6, 8].filter((level) => Math.log2(level) < top * 0.97);
    const named = [];
    const isFree = (y) => named.every((other) => Math.abs(other - y) > 13) && named.push(y);
    const lines = (level, kind, shown) => contour(found.map, level, f.toX, f.toY).map((points) => {
      const last = points[points.length - 1];
      return path(points, kind) + (points.length > 2 && isFree(last[1]) ? text(Math.min(last[0] - 4, width - RIGHT - 8), last[1] - 5, shown, "hint on", "end") : "");
    }).join("");
    const at = found.chosen || found.quickest;
    const x = f.toX(at);
    const y = f.toY(Math.min(1, Math.max(0, state.acceptance)));
    const cross = `<g class="cross"><path d="M${x - 9} ${y}H${x + 9}M${x} ${y - 9}V${y + 9}" class="under"/><path d="M${x - 9} ${y}H${x + 9}M${x} ${y - 9}V${y + 9}"/></g>`;
    const body = f.marks.replace(/class="grid"/g, 'class="grid none"') + lines(1, "contour break", "break even") + levels.map((level) => lines(level, "contour", `${level}×`)).join("") + cross;
    return { svg: svg(width, height, body), box: [LEFT, TOP, width - LEFT - RIGHT, height - TOP - BOTTOM], toState: (px, py) => [
      Math.min(16, Math.max(1, Math.round(0.5 + ((px - LEFT) / (width - LEFT - RIGHT)) * 16))),
      Math.min(1, Math.max(0, Math.round((1 - (py - TOP) / (height - TOP - BOTTOM)) * 100) / 100)),
    ] };
  }

  return { times, duration, count, byLength, byBatch, rowsOverTime, phases, lags, heat, PHASES };
})();
