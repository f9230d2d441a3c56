"use strict";
// A grid of cells, components by prompts: unpacking, counting over what is chosen, and painting. Knows no element but canvas.
(() => {
  const RIGHT_BEFORE = 1, RIGHT_AFTER = 2, CHANGED = 4, MISSING = 255;

  async function unpacked(text, Type) {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Type(await new Response(plain).arrayBuffer());
  }

  class Cells {
    static async of(data) {
      const cells = new Cells();
      const [flags, after, ...levels] = await Promise.all([
        unpacked(data.cells, Uint8Array), data.answers && unpacked(data.after, data.wide ? Uint32Array : Uint16Array),
        ...data.quantities.map((quantity) => unpacked(quantity.levels, Uint8Array)),
      ]);
      Object.assign(cells, { data, flags, levels, after, N: data.layers.length, P: data.prompts.length });
      cells.mixed = data.heads.some((head) => head < 0) && data.heads.some((head) => head >= 0);
      cells.amounts = data.quantities.map(({ bound }) => Float64Array.from({ length: 256 }, (_, q) => {
        const step = (q - 128) / 127;
        return q === 0 ? 0 : Math.sign(step) * step * step * bound;
      }));
      cells.rows = new Uint32Array(cells.N + 1); // changed cells before each row
      for (let h = 0; h < cells.N; h++) cells.rows[h + 1] = cells.rows[h] + cells.changedIn(h, 0, cells.P);
      if (data.attention) {
        cells.mass = await unpacked(data.attention.mass, Uint8Array);
        cells.attended = new Map(data.attention.heads.map((h, place) => [h, place]));
      }
      return cells;
    }

    changedIn(h, from, to) {
      let count = 0;
      for (let i = h * this.P + from; i < h * this.P + to; i++) {
        if (this.flags[i] !== MISSING && this.flags[i] & CHANGED) count++;
      }
      return count;
    }

    name(h) {
      const layer = this.data.layers[h], head = this.data.heads[h];
      return head < 0 ? (this.mixed ? `MLP ${layer}` : `${layer}`) : `${layer}.${head}`;
    }

    prompt(p) {
      const [id, text, answer, before, operation, ...extras] = this.data.prompts[p];
      return { id, text, answer, before, operation, extras };
    }

    // One cell, or null where nothing was computed: whether it is worse, the answers before and after (null: not stored),
    // the quantities, and the probability of the right answer before and after, where that is known.
    at(h, p) {
      const flag = this.flags[h * this.P + p], { answers, logprobs } = this.data;
      if (flag === MISSING) return null;
      const { before } = this.prompt(p), amounts = this.amounts.map((table, k) => table[this.levels[k][h * this.P + p]]);
      const changed = (flag & CHANGED) !== 0;
      return {
        worse: (flag & (RIGHT_BEFORE | RIGHT_AFTER)) === RIGHT_BEFORE,
        before,
        after: !answers ? null : changed ? answers[this.after[this.rows[h] + this.changedIn(h, 0, p)]] : before,
        amounts,
        chances: logprobs && [0, amounts.at(-1)].map((change) => Math.min(1, Math.exp(logprobs[p] + change))),
      };
    }

    // Attention mass by token type of a head on a sentence, largest first; null where it is not on the page.
    attention(h, p) {
      const place = this.attended?.get(h);
      if (place === undefined) return null;
      const types = this.data.attention.types;
      const start = (place * this.P + p) * types.length;
      const found = types.map((type, t) => ({ type, mass: this.mass[start + t] }));
      if (found.every(({ mass }) => mass === 255)) return null;
      return found.filter(({ mass }) => mass !== 255).map(({ type, mass }) => ({ type, mass: mass / 254 }))
        .sort((a, b) => b.mass - a.mass);
    }

    // Over the prompts: per component, cells computed, worse, better, and the sum of quantity k. Over the components: per
    // prompt, cells not computed, worse, better, and (asked for, since it takes time) the sum.
    count(components, prompts, k, sumsAt) {
      const { N, P, flags } = this, levels = this.levels[k], amounts = this.amounts[k];
      const cells = new Uint32Array(N), worse = new Uint32Array(N), better = new Uint32Array(N), sum = new Float64Array(N);
      const worseAt = new Uint32Array(P), betterAt = new Uint32Array(P), absentAt = new Uint32Array(P), sumAt = new Float64Array(P);
      const isChosen = new Uint8Array(N);
      for (const h of components) isChosen[h] = 1;
      const kind = new Uint8Array(256); // 1: worse, 2: better, 4: missing
      for (let flag = 0; flag < 8; flag++) kind[flag] = [0, 1, 2, 0][flag & 3];
      kind[MISSING] = 4;
      for (let h = 0; h < N; h++) {
        let lost = 0, won = 0, absent = 0, total = 0;
        const base = h * P, own = isChosen[h];
        for (let i = 0; i < prompts.length; i++) {
          const p = prompts[i], of = kind[flags[base + p]], amount = amounts[levels[base + p]];
          total += amount;
          if (sumsAt && own) sumAt[p] += amount;
          if (of === 1) { lost++; worseAt[p] += own; }
          else if (of === 2) { won++; betterAt[p] += own; }
          else if (of === 4) { absent++; absentAt[p] += own; }
        }
        cells[h] = prompts.length - absent;
        worse[h] = lost;
        better[h] = won;
        sum[h] = total;
      }
      return { cells, worse, better, sum, worseAt, betterAt, absentAt, sumAt };
    }

    // Every chosen cell, rows by columns, on a canvas; where several share a pixel, the most telling one is shown.
    // k: the quantity; null: the outcome.
    paint(canvas, components, prompts, k, colours) {
      const width = Math.max(1, Math.min(canvas.width, prompts.length)), height = Math.max(1, Math.min(canvas.height, components.length));
      const paper = new ImageData(width, height), pixels = new Uint32Array(paper.data.buffer);
      const { code, colour } = k === null ? this.byOutcome(colours) : this.byChange(colours);
      const best = new Uint8Array(width * height), columns = Uint32Array.from(prompts, (_, i) => (i * width / prompts.length) | 0);
      const source = k === null ? this.flags : this.levels[k];
      components.forEach((h, row) => {
        const line = ((row * height / components.length) | 0) * width, base = h * this.P;
        for (let i = 0; i < prompts.length; i++) {
          const at = line + columns[i], value = code[source[base + prompts[i]]];
          if (value > best[at]) best[at] = value;
        }
      });
      for (let i = 0; i < pixels.length; i++) pixels[i] = colour[best[i]];
      const small = new OffscreenCanvas(width, height);
      small.getContext("2d").putImageData(paper, 0, 0);
      const drawing = canvas.getContext("2d");
      drawing.imageSmoothingEnabled = false;
      drawing.clearRect(0, 0, canvas.width, canvas.height);
      drawing.drawImage(small, 0, 0, canvas.width, canvas.height);
    }

    byOutcome({ right, wrong, mended, broken, missing }) {
      const code = new Uint8Array(256); // the higher, the more telling; 0: missing
      for (let flag = 0; flag < 8; flag++) code[flag] = [2, 4, 3, 1][flag & 3];
      return { code, colour: Uint32Array.from([missing, right, wrong, mended, broken].map(pixel)) };
    }

    byChange({ right, mended, broken, missing }) {
      const code = new Uint8Array(256), colour = new Uint32Array(256);
      const by = Array.from({ length: 255 }, (_, i) => i + 1).sort((a, b) => Math.abs(a - 128) - Math.abs(b - 128) || b - a);
      colour[0] = pixel(missing);
      by.forEach((q, rank) => {
        code[q] = rank + 1;
        colour[rank + 1] = pixel(mixed(right, q < 128 ? broken : mended, Math.abs(q - 128) / 127));
      });
      return { code, colour };
    }
  }

  // "#rrggbb" as three numbers, as a pixel, and two mixed.
  const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const pixel = (hex) => { const [r, g, b] = parts(hex); return (0xff000000 | (b << 16) | (g << 8) | r) >>> 0; };
  const mixed = (from, to, share) => {
    const [a, b] = [parts(from), parts(to)];
    return `#${a.map((value, i) => Math.round(value + (b[i] - value) * share).toString(16).padStart(2, "0")).join("")}`;
  };

  Object.assign(window.mathinterp, { Cells, mixed });
})();
