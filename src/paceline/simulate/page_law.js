"use strict";
// What the page reckons with: step times, kept tokens, and a rollout as a fluid. No document is touched here.
// Seconds, tokens and rows throughout; the simulator in Python is what this agrees with (docs/simulate.md).

const law = (() => {
  const LONGEST = 16;
  const WORTH = 1.01;
  const READ_TOKENS = 8192;
  const HEADROOM = 0.01;

  /** Value at x of the broken line through (xs, ys), going on with the slope at its end. */
  function line(xs, ys, x) {
    let low = 0;
    let high = xs.length - 1;
    if (!high) return ys[0];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle;
      else high = middle;
    }
    return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
  }

  /** Reckoned passes: weights and collectives by the tokens that a graph is filled up to, attention by its roofline. */
  function analytic(sizes, buckets, engine) {
    const last = buckets[buckets.length - 1];
    const known = new Float64Array(last + 1);
    for (let tokens = 1, at = 0; tokens <= last; tokens++) {
      while (buckets[at] < tokens) at++;
      known[tokens] = line(sizes, engine.rest, buckets[at]);
    }
    const { token, row, moved, sums } = engine;
    return (rows, tokens, kv) =>
      (tokens <= last ? known[tokens] : line(sizes, engine.rest, tokens)) +
      token * tokens +
      row * rows +
      Math.max(moved * (kv + tokens), (sums * tokens * kv) / rows);
  }

  /** Measured passes: a table by cached tokens a row, rows, and tokens a row, with lines in between. */
  function measured(table) {
    const { rows: knots, each, contexts, seconds } = table;
    const among = (plane, rows, perRow) => {
      let high = 0;
      while (high < knots.length - 1 && knots[high] < rows) high++;
      const low = Math.max(0, high - 1);
      const above = line(each, plane[high], perRow);
      if (low === high || knots[high] === rows) return above;
      const below = line(each, plane[low], perRow);
      return below + ((above - below) * (rows - knots[low])) / (knots[high] - knots[low]);
    };
    const known = new Map();
    return (rows, tokens, kv) => {
      const place = rows * 1e6 + tokens;
      let by = known.get(place);
      if (!by) known.set(place, (by = seconds.map((plane) => among(plane, rows, tokens / rows))));
      return line(contexts, by, kv / rows);
    };
  }

  /** The step time of a choice of engine, or the one that was measured. */
  function stepTime(data, choice) {
    if (data.mode === "measured") return measured(data.table);
    const engine = engineOf(data, choice);
    return engine && analytic(data.sizes, data.buckets, engine);
  }

  /** The engine of a choice, null where the model does not divide so. */
  function engineOf(data, choice) {
    if (data.mode === "measured") return null;
    return data.engines[[choice.model, choice.hardware, choice.layout, choice.precision].join("|")] || null;
  }

  /**
   * Chances that a drafted token is kept, given that those before are, by depth. ``bend`` says down to which depth they
   * fall, and by how much those given differ from an even fall; ``fade`` how they fade with steps since the training.
   */
  function rates(state, bend, fade) {
    const lost = fade.shape === "linear" ? 1 - state.drift * state.stale : Math.pow(1 - state.drift, state.stale);
    const left = fade.shape === "linear" ? Math.max(fade.floor, lost) : fade.floor + (1 - fade.floor) * lost;
    return Array.from({ length: LONGEST }, (_, depth) => {
      const even = state.acceptance * Math.pow(1 - state.fall, Math.min(depth, bend.depth));
      return left * Math.min(1, Math.max(0, even * bend.by[Math.min(depth, bend.by.length - 1)]));
    });
  }

  /** By draft length: mean tokens of a pass, and tokens by which a row's last pass goes beyond its end, on average. */
  function kept(conditional) {
    const mean = [1];
    const beyond = [0];
    const noise = [0];
    for (let drafted = 1; drafted <= LONGEST; drafted++) {
      let first = 0;
      let second = 0;
      let atLeast = 1;
      for (let tokens = 1; tokens <= drafted + 1; tokens++) {
        first += atLeast;
        second += (2 * tokens - 1) * atLeast;
        atLeast *= tokens <= drafted ? conditional[tokens - 1] : 0;
      }
      mean.push(first);
      beyond.push((second - first) / (2 * first));
      noise.push(Math.max(0, second - first * first) / first);
    }
    return { mean, beyond, noise };
  }

  /** Random numbers from 0 to 1 that are the same each time (a 32-bit Weyl sequence, mixed). */
  function randomness(seed) {
    let state = seed | 0;
    return () => {
      state = (state + 0x9e3779b9) | 0;
      let word = Math.imul(state ^ (state >>> 16), 0x21f0aaad);
      word = Math.imul(word ^ (word >>> 15), 0x735a2d97);
      return ((word ^ (word >>> 15)) >>> 0) / 4294967296;
    };
  }

  /** Standard normal scores by the polar method of Marsaglia. */
  function normals(count, random) {
    const scores = new Float64Array(count);
    for (let at = 0; at < count; ) {
      const x = 2 * random() - 1;
      const y = 2 * random() - 1;
      const square = x * x + y * y;
      if (square >= 1 || square === 0) continue;
      const size = Math.sqrt((-2 * Math.log(square)) / square);
      scores[at++] = x * size;
      if (at < count) scores[at++] = y * size;
    }
    return scores;
  }

  /**
   * Normal scores of lengths by draw: those of the simulated steps, and of prompts and siblings beyond them as many more,
   * which have ``share`` of their variance in common within a prompt.
   */
  function scoresOf(draws) {
    const given = draws.scores.map((text) => {
      const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
      return Float64Array.from(new Int16Array(bytes.buffer), (word) => word / draws.unit);
    });
    const memory = new Map();
    return (draw, prompts, siblings) => {
      const place = `${draw}/${prompts}/${siblings}`;
      if (!memory.has(place)) {
        if (memory.size > 40) memory.clear();
        memory.set(place, extended(given[draw], draws, randomness(draw), prompts, siblings));
      }
      return memory.get(place);
    };
  }

  function extended(known, draws, random, prompts, siblings) {
    const common = normals(prompts, random);
    const own = normals(prompts * siblings, random);
    const scores = new Float64Array(prompts * siblings);
    for (let prompt = 0; prompt < prompts; prompt++) {
      const isKnown = known && prompt < draws.prompts;
      let mean = 0;
      for (let at = 0; isKnown && at < draws.siblings; at++) mean += known[prompt * draws.siblings + at] / draws.siblings;
      const shared = isKnown ? mean : Math.sqrt(draws.share) * common[prompt];
      for (let at = 0; at < siblings; at++) {
        const place = prompt * siblings + at;
        scores[place] = isKnown && at < draws.siblings
          ? known[prompt * draws.siblings + at]
          : shared + Math.sqrt(1 - draws.share) * own[place];
      }
    }
    return scores;
  }

  /** Response lengths of one draw, by prompt and sibling in order. */
  function lengths(state, scores) {
    const mu = Math.log(state.mean) - (state.sigma * state.sigma) / 2;
    return scores.map((score) => Math.min(state.longest, Math.max(1, Math.ceil(Math.exp(mu + state.sigma * score)))));
  }

  /** The smallest of a binary heap, out of it; ``keys`` are what it is ordered by. */
  function pop(heap, keys) {
    const top = heap[0];
    const last = heap.pop();
    const size = heap.length;
    if (!size) return top;
    let at = 0;
    for (;;) {
      let child = 2 * at + 1;
      if (child >= size) break;
      if (child + 1 < size && keys[heap[child + 1]] < keys[heap[child]]) child++;
      if (keys[heap[child]] >= keys[last]) break;
      heap[at] = heap[child];
      at = child;
    }
    heap[at] = last;
    return top;
  }

  function push(heap, keys, added) {
    let at = heap.length;
    heap.push(added);
    while (at) {
      const parent = (at - 1) >> 1;
      if (keys[heap[parent]] <= keys[added]) break;
      heap[at] = heap[parent];
      at = parent;
    }
    heap[at] = added;
  }

  /**
   * One engine on a clock of tokens a row. ``tell`` hears of each span of constant rows, in order: its rows, its length
   * on that clock, its mean cached tokens, the requests that end it, and the seconds of reading prompts before it.
   */
  function schedule(numbers, lengthOf, state, time, tell) {
    const { prompt, slots } = state;
    const most = state.kv || Infinity;
    const emitted = new Float64Array(numbers.length);
    const waiting = [];
    for (let at = numbers.length - 1; at >= 0; at--) waiting.push(at);
    // An admission is a request's stay in a slot; the newest is the last one that is not over.
    const requestOf = [];
    const started = [];
    const finish = [];
    const isOver = [];
    const newest = [];
    const heap = [];
    const cached = new Set();
    let clock = 0;
    let kv = 0;
    let rows = 0;
    while (waiting.length || rows) {
      const parts = [];
      while (waiting.length && rows < slots) {
        const at = waiting[waiting.length - 1];
        const held = prompt + emitted[at];
        if (rows && kv + held + rows + 1 > most * (1 - HEADROOM)) break;
        waiting.pop();
        kv += held;
        rows++;
        const admission = requestOf.push(at) - 1;
        started.push(clock - emitted[at]);
        finish.push(clock - emitted[at] + lengthOf[at]);
        isOver.push(false);
        newest.push(admission);
        push(heap, finish, admission);
        const group = Math.floor(numbers[at] / state.siblings);
        const known = cached.has(group) ? Math.min(prompt, held - 1) : 0;
        cached.add(group);
        if (held - 1 > known) parts.push([held - 1 - known, known]);
      }
      while (rows > 1 && kv + rows > most) {
        let out = newest.pop();
        while (isOver[out]) out = newest.pop();
        isOver[out] = true;
        const at = requestOf[out];
        emitted[at] = Math.floor(clock - started[out]);
        kv -= prompt + emitted[at];
        rows--;
        waiting.push(at);
      }
      while (isOver[heap[0]]) pop(heap, finish);
      const room = rows > 1 && most < Infinity ? Math.max(1, Math.floor((most - kv) / rows)) : Infinity;
      const next = Math.min(finish[heap[0]], clock + room);
      const tokens = next - clock;
      const held = kv + (rows * Math.max(0, tokens - 1)) / 2;
      const before = rows;
      let ends = 0;
      kv += rows * tokens;
      clock = next;
      while (heap.length && (isOver[heap[0]] || finish[heap[0]] <= clock)) {
        const ended = pop(heap, finish);
        if (isOver[ended]) continue;
        isOver[ended] = true;
        rows--;
        kv -= prompt + lengthOf[requestOf[ended]];
        ends++;
      }
      tell(before, tokens, held, ends, parts.length ? read(parts, time) : 0);
    }
  }

  /** Seconds of passes that read ``parts``: [tokens left, tokens known] of each prompt. */
  function read(parts, time) {
    let seconds = 0;
    while (parts.length) {
      let rows = 0;
      let tokens = 0;
      let before = 0;
      while (parts.length && tokens < READ_TOKENS) {
        const [left, known] = parts[0];
        const now = Math.min(left, READ_TOKENS - tokens);
        rows++;
        tokens += now;
        before += known;
        if (now < left) parts[0] = [left - now, known + now];
        else parts.shift();
      }
      seconds += time(rows, tokens, before);
    }
    return seconds;
  }

  /** Spans gathered by rows, few of them where rows are many; ``spans`` has them in order as well, if it is a list. */
  function gathering(slots, spans) {
    const places = 24 + Math.ceil(24 * Math.log2(Math.max(1, slots / 24))) + 1;
    const sums = Array.from({ length: 4 }, () => new Float64Array(places + 1));
    const [rowsOf, tokensOf, kvOf, endsOf] = sums;
    let read = 0;
    const tell = (rows, tokens, kv, ends, reading) => {
      const place = rows < 24 ? rows : 24 + Math.round(24 * Math.log2(rows / 24));
      rowsOf[place] += rows * tokens;
      tokensOf[place] += tokens;
      kvOf[place] += kv * tokens;
      endsOf[place] += ends;
      read += reading;
      if (spans) spans.push({ rows, tokens, kv, ends, reading });
    };
    const bins = () => {
      const found = [];
      tokensOf.forEach((tokens, place) => {
        if (tokens) found.push({ rows: Math.round(rowsOf[place] / tokens), tokens, kv: kvOf[place] / tokens, ends: endsOf[place] });
      });
      return { bins: found, reading: read };
    };
    return { tell, bins };
  }

  /** Every engine's spans, gathered, of one draw of lengths; ``luck`` moves each end, in deviations of a row's own. */
  function played(state, lengthOf, time, luck, inOrder) {
    const engines = Array.from({ length: Math.min(state.engines, state.prompts) }, () => []);
    for (let at = 0; at < lengthOf.length; at++) engines[((at / state.siblings) | 0) % engines.length].push(at);
    return engines.map((numbers) => {
      const own = new Float64Array(numbers.length);
      for (let i = 0; i < own.length; i++) {
        const length = lengthOf[numbers[i]];
        own[i] = luck ? Math.max(1, length + Math.sqrt(length) * luck[numbers[i]]) : length;
      }
      const spans = inOrder ? [] : null;
      const gathered = gathering(state.slots, spans);
      schedule(numbers, own, state, time, gathered.tell);
      if (inOrder) inOrder.push(spans);
      return gathered.bins();
    });
  }

  /** Seconds of a pass of ``rows`` that each draft so many. */
  function pass(state, time, rows, drafted, kv) {
    return time(rows, rows * (1 + drafted), kv) + (drafted ? state.fixed + state.each * drafted : 0);
  }

  /** [seconds of spans on a clock of tokens, what a token beyond each end adds, reading] of the slowest engine. */
  function spent(engine, state, time, drafted) {
    let clock = 0;
    let ends = 0;
    for (const bin of engine.bins) {
      const seconds = pass(state, time, bin.rows, drafted, bin.kv);
      clock += seconds * bin.tokens;
      ends += (seconds * bin.ends) / bin.rows;
    }
    return [clock, ends, engine.reading];
  }

  return {
    LONGEST, WORTH, line, analytic, measured, stepTime, engineOf, rates, kept, randomness, normals, scoresOf, lengths, played, pass, spent,
  };
})();
