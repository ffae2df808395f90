// Everything that the page says of a setting, from the law; no document is touched here either.

const answer = (() => {
  const LONGEST = law.LONGEST;
  const BATCHES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024];
  const MOST_DRAWS = 20;
  const LAGS = [0, 1, 2, 3, 4];
  const MAP_ROWS = 41;

  /** A function from a state to its answer; what a state shares with the one before is kept. */
  function over(data) {
    const scores = law.scoresOf(data.draws);
    let timed = ["", null];
    let played = ["", null];
    return (state) => {
      const engine = [state.model, state.hardware, state.layout, state.precision].join("|");
      if (timed[0] !== engine) timed = [engine, law.stepTime(data, state)];
      const time = timed[1];
      const names = ["prompts", "siblings", "prompt", "mean", "sigma", "longest", "slots", "engines", "kv"];
      const setting = [engine, ...names.map((name) => state[name])].join("|");
      if (played[0] !== setting) played = [setting, play(data, scores, state, time)];
      return answered(data, state, time, played[1]);
    };
  }

  const lucks = new Map();
  function luckOf(draw, count) {
    const place = `${draw}/${count}`;
    if (lucks.size > 40) lucks.clear();
    if (!lucks.has(place)) lucks.set(place, law.normals(count, law.randomness(draw + 1000)));
    return lucks.get(place);
  }

  /** Every draw's engines, with and without their rows' luck; the spans of the first draw in order. */
  function play(data, scores, state, time) {
    const caches = cachesOf(data, state);
    const fits = { ...state, kv: caches && Math.max(caches, state.prompt + state.longest + 1) };
    const isGiven = state.prompts === data.draws.prompts && state.siblings === data.draws.siblings;
    const most = isGiven ? data.draws.scores.length : MOST_DRAWS;
    const count = Math.max(1, Math.min(most, Math.floor(data.draws.most / (state.prompts * state.siblings))));
    const draws = [];
    const first = [];
    let tokens = 0;
    for (let draw = 0; draw < count; draw++) {
      const lengths = law.lengths(state, scores(draw, state.prompts, state.siblings));
      tokens += lengths.reduce((sum, length) => sum + length, 0) / lengths.length / count;
      const luck = luckOf(draw, lengths.length);
      draws.push({
        even: law.played(fits, lengths, time, null, draw ? null : first),
        lucky: law.played(fits, lengths, time, luck),
      });
    }
    return { draws, first, tokens };
  }

  /** (chances, drafted) -> seconds of a rollout, the mean over the draws; ``draw`` for one of them alone. */
  function rolloutOf(state, time, draws) {
    const known = new Map();
    const parts = (drafted) => {
      if (!known.has(drafted)) {
        const of = (engines) => engines.map((engine) => law.spent(engine, state, time, drafted));
        known.set(drafted, draws.map((draw) => [of(draw.even), drafted ? of(draw.lucky) : null]));
      }
      return known.get(drafted);
    };
    return (kept, drafted, draw = null) => {
      const mean = kept.mean[drafted];
      const beyond = kept.beyond[drafted];
      const luck = Math.sqrt(kept.noise[drafted]);
      const slowest = (engines) => {
        let most = 0;
        for (const [clock, ends, reading] of engines) most = Math.max(most, (clock + beyond * ends) / mean + reading);
        return most;
      };
      const each = parts(drafted).map(([even, lucky]) => {
        const seconds = slowest(even);
        return lucky && luck ? seconds + luck * (slowest(lucky) - seconds) : seconds;
      });
      return draw === null ? each.reduce((sum, one) => sum + one, 0) / each.length : each[draw];
    };
  }

  function answered(data, state, time, { draws, first, tokens }) {
    const kept = law.kept(law.rates(state, data.bend, data.fade));
    const seconds = rolloutOf(state, time, draws);
    const plain = seconds(kept, 0);
    const speedups = Array.from({ length: LONGEST + 1 }, (_, drafted) => plain / seconds(kept, drafted));
    let quickest = 1;
    for (let drafted = 2; drafted <= LONGEST; drafted++) if (speedups[drafted] > speedups[quickest]) quickest = drafted;
    const best = speedups[quickest] >= law.WORTH ? quickest : 0;
    const chosen = state.drafted === "best" ? best : state.drafted;
    const plainSeconds = seconds(kept, 0, 0);
    const steps = stepsOf(state, plainSeconds);
    return {
      // The last pass of a request keeps tokens that are beyond its end.
      perForward: kept.mean.map((mean, drafted) => (mean * tokens) / (tokens + kept.beyond[drafted])),
      speedups,
      quickest,
      best,
      chosen,
      plainSeconds,
      draftedSeconds: plainSeconds / speedups[chosen],
      adaptive: plain / adaptiveOf(state, time, draws, kept),
      steps,
      stepSpeedups: speedups.map((speedup, drafted) => steps.speedup(drafted ? speedup : 1, drafted, state.lag)),
      map: mapOf(data, state, seconds),
      batches: batchesOf(data, state, time, kept),
      rows: [rowsOf(first, state, time, kept, 0), rowsOf(first, state, time, kept, chosen)],
    };
  }

  /** Where each pass drafts the length with the most tokens a second; its luck is what its lengths' is on average. */
  function adaptiveOf(state, time, draws, kept) {
    const of = (engine) => {
      let seconds = engine.reading;
      let tokens = 0;
      let noise = 0;
      for (const bin of engine.bins) {
        let least = Infinity;
        let at = 0;
        for (let drafted = 0; drafted <= LONGEST; drafted++) {
          const each = law.pass(state, time, bin.rows, drafted, bin.kv) / kept.mean[drafted];
          if (each >= least) continue;
          least = each;
          at = drafted;
        }
        seconds += least * (bin.tokens + (kept.beyond[at] * bin.ends) / bin.rows);
        tokens += bin.tokens;
        noise += bin.tokens * kept.noise[at];
      }
      return [seconds, Math.sqrt(noise / tokens)];
    };
    const slowest = (engines) => engines.map(of).reduce((most, one) => (one[0] > most[0] ? one : most));
    return draws.reduce((sum, draw) => {
      const [even, luck] = slowest(draw.even);
      return sum + even + luck * (slowest(draw.lucky)[0] - even);
    }, 0) / draws.length;
  }

  /** The step: phases plain and drafted, and how long it is once the pipeline is full (``steady_seconds``). */
  function stepsOf(state, generation) {
    const sides = (speedup, drafted) => ({
      generation: generation / speedup,
      refit: state.refit,
      logprob: state.logprob,
      train: state.train,
      drafter: drafted ? state.drafter : 0,
    });
    const seconds = (phases, lag) => {
      const rollout = phases.generation + phases.refit;
      const train = phases.logprob + phases.train + phases.drafter;
      return Math.max(rollout, train, (rollout + train) / (lag + 1));
    };
    const others = state.refit + state.logprob + state.train;
    return {
      sides,
      seconds,
      others,
      share: generation / (generation + others),
      speedup: (speedup, drafted, lag) => seconds(sides(1, 0), lag) / seconds(sides(speedup, drafted), lag),
      lags: [...new Set([...LAGS, state.lag])].sort((a, b) => a - b),
    };
  }

  /** Speedups by acceptance at depth 1 (rows, from 0 to 1) and draft length (columns, from 1). */
  function mapOf(data, state, seconds) {
    const plain = seconds(law.kept([]), 0);
    return Array.from({ length: MAP_ROWS }, (_, at) => {
      const kept = law.kept(law.rates({ ...state, acceptance: at / (MAP_ROWS - 1) }, data.bend, data.fade));
      return Array.from({ length: LONGEST }, (_, column) => plain / seconds(kept, column + 1));
    });
  }

  /** Full batches of requests in the middle of their answers: [rows, speedup of a pass by draft length]. */
  function batchesOf(data, state, time, kept) {
    const most = data.mode === "measured" ? data.table.rows[data.table.rows.length - 1] : Infinity;
    const context = state.prompt + Math.min(state.mean, state.longest) / 2;
    return [...new Set([...BATCHES, state.slots])].sort((a, b) => a - b).filter((rows) => rows <= most).map((rows) => {
      const kv = rows * context;
      const plain = law.pass(state, time, rows, 0, kv);
      const faster = kept.mean.map((mean, drafted) => (mean * plain) / law.pass(state, time, rows, drafted, kv));
      return [rows, faster];
    });
  }

  /** Requests in flight of the first draw: points [seconds, rows], the end, and the tail's share of the busy time. */
  function rowsOf(engines, state, time, kept, drafted) {
    const changes = [];
    let busy = 0;
    let tail = 0;
    let end = 0;
    for (const spans of engines) {
      let clock = 0;
      let before = 0;
      for (const span of spans) {
        const each = law.pass(state, time, span.rows, drafted, span.kv) / kept.mean[drafted];
        const spent = span.reading + each * (span.tokens + (kept.beyond[drafted] * span.ends) / span.rows);
        if (span.rows !== before) changes.push([clock, span.rows - before]);
        before = span.rows;
        clock += spent;
        if (4 * span.rows < state.slots) tail += spent;
      }
      changes.push([clock, -before]);
      busy += clock;
      end = Math.max(end, clock);
    }
    changes.sort((a, b) => a[0] - b[0]);
    const points = [[0, 0]];
    let rows = 0;
    for (const [at, change] of changes) {
      rows += change;
      const last = points[points.length - 1];
      if (at - last[0] < end / 400) last[1] = rows;
      else points.push([at, rows]);
    }
    return { points, end, tail: tail / busy };
  }

  /** Tokens that an engine's caches hold: those that are set, else what is left of memory; 0 where nothing is known. */
  function cachesOf(data, state) {
    if (state.kv || data.mode === "measured") return state.kv;
    const engine = law.engineOf(data, state);
    const context = state.prompt + Math.round(state.mean);
    const free = data.hardware[state.hardware] - engine.weights;
    return Math.max(0, Math.floor(free / (engine.held[0] + engine.held[1] * context))) * context;
  }

  /** What keeps the engine from running at all, or "". */
  function trouble(data, state) {
    if (cachesOf(data, state) || data.mode === "measured") return "";
    const engine = law.engineOf(data, state);
    const [has, takes] = [data.hardware[state.hardware], engine.weights].map((bytes) => `${(bytes / 1e9).toFixed(0)} GB`);
    return engine.weights > data.hardware[state.hardware]
      ? `Does not fit: ${takes} of weights a GPU, where an engine has ${has}.`
      : `Does not fit: beside ${takes} of weights, ${has} hold no request of this length.`;
  }

  /** The verdict, one sentence. */
  function verdict(found, state) {
    const gain = (value) => `${value.toFixed(value < 9.95 ? 2 : 1)}×`;
    if (!found.best) return "Leave drafting off: no draft length makes these rollouts 1 % quicker.";
    const rollouts = `Draft ${found.best}: rollouts ${gain(found.speedups[found.best])} as fast`;
    if (!found.steps.others) return `${rollouts}.`;
    const step = found.stepSpeedups[found.best];
    if (step >= law.WORTH) return `${rollouts}, steps ${gain(step)}.`;
    return step < 1 / law.WORTH
      ? `Leave drafting off: rollouts would be ${gain(found.speedups[found.best])} as fast, but steps slower.`
      : `Drafting hardly matters: rollouts ${gain(found.speedups[found.best])} as fast, but training sets the pace.`;
  }

  return { over, verdict, cachesOf, trouble };
})();
