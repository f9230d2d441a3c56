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
      const [flags, levels, after] = await Promise.all([
        unpacked(data.cells, Uint8Array), unpacked(data.change, Uint8Array),
        unpacked(data.after, data.wide ? Uint32Array : Uint16Array),
      ]);
      Object.assign(cells, { data, flags, levels, after, N: data.layers.length, P: data.prompts.length });
      cells.nats = Float64Array.from({ length: 256 }, (_, q) => {
        const step = (q - 128) / 127;
        return q === 0 ? 0 : Math.sign(step) * step * step * data.bound;
      });
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
      return this.data.heads[h] < 0 ? `${this.data.layers[h]}` : `${this.data.layers[h]}.${this.data.heads[h]}`;
    }

    prompt(p) {
      const [id, text, answer, before, operation] = this.data.prompts[p];
      return { id, text, answer, before, operation };
    }

    // One cell: whether it is there, right before and after, the two answers, and the change in nats.
    at(h, p) {
      const flag = this.flags[h * this.P + p];
      if (flag === MISSING) return null;
      const { before } = this.prompt(p);
      const changed = (flag & CHANGED) !== 0;
      return {
        rightBefore: (flag & RIGHT_BEFORE) !== 0,
        rightAfter: (flag & RIGHT_AFTER) !== 0,
        before,
        after: changed ? this.data.answers[this.after[this.rows[h] + this.changedIn(h, 0, p)]] : before,
        change: this.nats[this.levels[h * this.P + p]],
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

    // Over the prompts: per component, cells, answers broken and mended, summed change. Over the components: per prompt,
    // answers broken, mended, and summed change.
    count(components, prompts) {
      const { N, P, flags, levels, nats } = this;
      const cells = new Uint32Array(N), broken = new Uint32Array(N), mended = new Uint32Array(N), change = new Float64Array(N);
      const brokenAt = new Uint32Array(P), mendedAt = new Uint32Array(P);
      const isChosen = new Uint8Array(N);
      for (const h of components) isChosen[h] = 1;
      const kind = new Uint8Array(256); // 1: broken, 2: mended, 4: missing
      for (let flag = 0; flag < 8; flag++) kind[flag] = [0, 1, 2, 0][flag & 3];
      kind[MISSING] = 4;
      for (let h = 0; h < N; h++) {
        let lost = 0, won = 0, absent = 0, sum = 0;
        const base = h * P, own = isChosen[h];
        for (let i = 0; i < prompts.length; i++) {
          const p = prompts[i], of = kind[flags[base + p]];
          sum += nats[levels[base + p]];
          if (of === 1) { lost++; brokenAt[p] += own; }
          else if (of === 2) { won++; mendedAt[p] += own; }
          else if (of === 4) absent++;
        }
        cells[h] = prompts.length - absent;
        broken[h] = lost;
        mended[h] = won;
        change[h] = sum;
      }
      return { cells, broken, mended, change, brokenAt, mendedAt };
    }

    // Every chosen cell, rows by columns, on a canvas; where several share a pixel, the most telling one is shown.
    paint(canvas, components, prompts, byChange, colours) {
      const width = Math.max(1, Math.min(canvas.width, prompts.length)), height = Math.max(1, Math.min(canvas.height, components.length));
      const paper = new ImageData(width, height), pixels = new Uint32Array(paper.data.buffer);
      const { code, colour } = byChange ? this.byChange(colours) : this.byOutcome(colours);
      const best = new Uint8Array(width * height), columns = Uint32Array.from(prompts, (_, i) => (i * width / prompts.length) | 0);
      const source = byChange ? this.levels : this.flags;
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
