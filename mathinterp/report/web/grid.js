"use strict";
// Exploring a grid: choose components to see which sentences break, choose sentences to see which components matter.
(() => {
  const { Cells, Lists, mixed, colour, say, make, counted, amount, ofCell, number } = window.mathinterp;
  const labelled = (text, control) => {
    control.setAttribute("aria-label", text); // else the label's name would have the choices in it
    return make("label", {}, make("span", {}, text), control);
  };
  const capital = (text) => `${text[0].toUpperCase()}${text.slice(1)}`;

  class Explorer extends Lists {
    constructor(room, cells) {
      super();
      const { data } = cells;
      Object.assign(this, { room, cells, word: data.word, words: data.outcomes, head: null, cursor: [0, 0] });
      this.all = Int32Array.from({ length: cells.N }, (_, h) => h);
      this.operations = [...new Set(data.prompts.map((prompt) => prompt[4]))];
      this.texts = data.prompts.map(([id, text]) => `${text} ${id}`.toLowerCase());
      this.layers = Math.max(...data.layers) + 1;
      this.across_heads = Math.max(...data.heads) + 1;
      this.columns = Math.max(this.across_heads + cells.mixed, 1);
      this.place = new Map(Array.from(this.all, (h) => [`${data.layers[h]}/${this.columnOf(h)}`, h]));
      this.partly = cells.flags.includes(255);
      this.build();
      this.reset();
      document.addEventListener("recoloured", () => this.update());
    }

    // On the map MLPs are a last column, or the only one.
    columnOf(h) {
      const head = this.cells.data.heads[h];
      return head < 0 ? this.columns - 1 : head;
    }

    // ---- what is on the page ----

    select(choices, changed) {
      return make("select", { onchange: changed }, ...choices.map(([value, text]) => make("option", { value }, text)));
    }

    build() {
      const { word, words } = this, { data } = this.cells, redo = () => this.filter(), again = () => this.update();
      this.operation = this.select(["all", ...this.operations].map((name) => [name, name]), redo);
      this.text = make("input", { type: "search", placeholder: "for example 17 +", oninput: redo });
      this.named = make("input", { type: "search", placeholder: !this.across_heads ? "for example 0, 3" : this.cells.mixed ? "for example 0.6, MLP 3" : "for example 0.6, 3", oninput: redo });
      this.coloured = this.select([["", "answers"], ...data.quantities.map(({ title }, k) => [`${k}`, title])], again);
      this.coloured.value = data.by_quantity ? "0" : "";
      this.order = this.select([["", "as numbered"], ["worst", "worst first"], ...(this.partly ? [["computed", "most computed first"]] : [])], again);
      this.order.value = data.decisions ? "computed" : "";
      const found = [...new Set((data.decisions?.rows ?? []).map((row) => row?.decision).filter(Boolean))];
      this.decided = this.select(["all", ...found].map((name) => [name, name]), redo);
      const clear = make("button", { type: "button", onclick: () => this.reset() }, "Choose all again");
      this.status = make("p", { class: "status", role: "status" });
      this.map = this.canvas(`${word}s by layer, coloured by what they do to the chosen prompts`, (box) => this.chooseOnMap(box), (x, y) => this.onMap(x, y));
      this.heat = this.canvas(`${word}s by prompts; arrow keys move, Enter lists what the ${word} ${words.worse[0]}s`, (box) => this.chooseOnHeat(box), (x, y) => this.onHeat(x, y));
      this.heat.addEventListener("keydown", (event) => this.keyed(event));
      this.mapTitle = make("h4", {});
      this.legend = make("div", { class: "legend" });
      this.worstHeads = make("div", { class: "scroll names", tabindex: 0, role: "region", "aria-label": `${word}s that matter` });
      this.worstPrompts = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "prompts that matter" });
      this.sentences = make("div", { class: "sentences" });
      this.tip = make("div", { class: "tip", hidden: true });
      const last = this.cells.mixed ? ", the last column is MLPs" : "";
      this.room.replaceChildren(
        make("div", { class: "controls" }, labelled("Operation", this.operation), labelled("Sentences with", this.text),
          labelled(`${capital(word)}s`, this.named), data.decisions ? labelled("Decision", this.decided) : null, labelled("Colour", this.coloured), labelled("Order", this.order), clear),
        this.status,
        make("div", { class: "panels" },
          make("div", {}, this.mapTitle, this.map, make("p", { class: "hint" }, `Layer 0 is below${last}. Drag to choose ${word}s, click for one ${word}'s sentences.${this.dotted()}`)),
          make("div", {}, make("h4", {}, `${word}s (down) by prompts (across)`), this.heat, this.legend,
            make("p", { class: "hint" }, "Drag to choose, click a cell for its sentences."))),
        make("div", { class: "panels even" },
          make("div", {}, make("h4", {}, `${word}s that ${words.worse[0]} most of the chosen prompts`), this.worstHeads),
          make("div", {}, make("h4", {}, `Prompts that the chosen ${word}s ${words.worse[0]} most`), this.worstPrompts)),
        this.sentences, this.tip, make("p", { class: "hint" }, this.precision()));
    }

    dotted() {
      const { decisions } = this.cells.data, row = decisions?.rows.find(Boolean);
      return row ? ` Dot: decided to be above ${row.threshold} ${decisions.unit}.` : "";
    }

    precision() {
      const { data } = this.cells, { attention } = data;
      const kept = data.quantities.map(({ title, unit, bound, error }) =>
        `${capital(title)} is kept in 255 steps of ± (k/127)² × ${bound.toPrecision(4)} ${unit}, off by at most ${error.toPrecision(2)}.`);
      const left = attention?.left_out
        ? [`Attention: only of the ${counted(attention.heads.length, "head")} that matter most; ${counted(attention.left_out, "other")} left out for size (run ${attention.run} has them).`]
        : [];
      const absent = data.decisions
        ? ["Cells that were not computed are blank; counts and shares are of those that were. A decided node stopped early: of its drop the decision's estimate counts, not its share here."]
        : this.partly ? ["Cells that were not computed are blank; counts and shares are of those that were."] : [];
      return [this.words.about, ...absent, ...kept, ...left].join(" ");
    }

    canvas(label, choose, tell) {
      const canvas = make("canvas", { tabindex: 0, role: "application", "aria-label": label });
      let from = null;
      const where = (event) => {
        const box = canvas.getBoundingClientRect();
        return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height].map((part) => Math.min(Math.max(part, 0), 0.999999));
      };
      canvas.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        canvas.setPointerCapture(event.pointerId);
        from = where(event);
      });
      canvas.addEventListener("pointerup", (event) => {
        if (!from) return;
        const to = where(event), [left, right] = [from[0], to[0]].sort((a, b) => a - b), [top, bottom] = [from[1], to[1]].sort((a, b) => a - b);
        const box = canvas.getBoundingClientRect();
        const isClick = (right - left) * box.width < 5 && (bottom - top) * box.height < 5;
        from = null;
        if (isClick) this.repaint();
        choose({ left, right, top, bottom, isClick });
      });
      canvas.addEventListener("pointermove", (event) => {
        const [x, y] = where(event);
        if (from) this.outline(canvas, from, [x, y]);
        this.showTip(event, tell(x, y));
      });
      canvas.addEventListener("pointercancel", () => { from = null; });
      canvas.addEventListener("pointerleave", () => this.showTip(null));
      return canvas;
    }

    // ---- choosing ----

    reset() {
      this.operation.value = "all";
      this.decided.value = "all";
      this.text.value = this.named.value = "";
      this.brushedHeads = this.brushedPrompts = null;
      this.filter();
    }

    filter() {
      const operation = this.operation.value, text = this.text.value.trim().toLowerCase(), { prompts } = this.cells.data;
      const within = this.brushedPrompts ?? prompts.keys();
      this.prompts = Int32Array.from([...within].filter((p) =>
        (operation === "all" || prompts[p][4] === operation) && (!text || this.texts[p].includes(text))));
      const named = this.named.value.toLowerCase().replace(/mlp\s+(?=\d)/g, "mlp").split(/[\s,]+/).filter(Boolean), decided = this.decided.value;
      this.heads = (this.brushedHeads ?? this.all).filter((h) =>
        (!named.length || named.some((name) => name === this.cells.name(h).toLowerCase().replace(" ", "") || name === `${this.cells.data.layers[h]}`
          || (name === "mlp" && this.cells.data.heads[h] < 0))) && (decided === "all" || this.decision(h)?.decision === decided));
      this.update();
    }

    chooseOnMap({ left, right, top, bottom, isClick }) {
      const chosen = [];
      for (let row = Math.floor(top * this.layers); row <= Math.floor(bottom * this.layers); row++) {
        for (let column = Math.floor(left * this.columns); column <= Math.floor(right * this.columns); column++) {
          const h = this.place.get(`${this.layers - 1 - row}/${column}`);
          if (h !== undefined) chosen.push(h);
        }
      }
      if (!chosen.length) return;
      if (isClick) this.drill(chosen[0]);
      else {
        this.brushedHeads = Int32Array.from(chosen).sort();
        this.filter();
      }
    }

    chooseOnHeat({ left, right, top, bottom, isClick }) {
      const { rows, across } = this;
      if (!rows.length || !across.length) return;
      const between = (list, from, to) => list.slice(Math.floor(from * list.length), Math.floor(to * list.length) + 1);
      if (isClick) {
        this.drill(rows[Math.floor(top * rows.length)]);
        return;
      }
      this.brushedHeads = Int32Array.from(between(rows, top, bottom)).sort();
      this.brushedPrompts = Int32Array.from(between(across, left, right)).sort();
      this.filter();
    }

    keyed(event) {
      const { rows, across } = this, steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
      if (!rows.length || !across.length) return;
      const [row, column] = this.cursor;
      if (event.key === "Enter") this.drill(rows[Math.min(row, rows.length - 1)]);
      if (!steps) return;
      event.preventDefault();
      this.cursor = [Math.min(Math.max(row + steps[0], 0), rows.length - 1), Math.min(Math.max(column + steps[1], 0), across.length - 1)];
      say(this.onHeat((this.cursor[1] + 0.5) / across.length, (this.cursor[0] + 0.5) / rows.length).join(", "));
    }

    // ---- showing ----

    update() {
      performance.mark("filter-start");
      const { cells, word, words } = this, { value } = this.coloured, ordered = this.order.value;
      this.byQuantity = value !== "";
      this.quantity = cells.data.quantities[Number(value)];
      this.counts = cells.count(this.heads, this.prompts, Number(value), this.byQuantity);
      const { worse, better, worseAt, absentAt, sumAt, cells: computed } = this.counts;
      this.rows = [...this.heads];
      this.across = [...this.prompts];
      if (ordered === "worst") {
        this.rows.sort((a, b) => (this.effect(a) ?? 0) - (this.effect(b) ?? 0) || a - b);
        this.across.sort((a, b) => (this.byQuantity ? sumAt[a] - sumAt[b] : worseAt[b] - worseAt[a]) || a - b);
      } else if (ordered === "computed") {
        this.rows.sort((a, b) => computed[b] - computed[a] || a - b);
        this.across.sort((a, b) => absentAt[a] - absentAt[b] || a - b);
      }
      const sum = (counts) => this.heads.reduce((total, h) => total + counts[h], 0);
      const shown = sum(computed), whole = this.heads.length * this.prompts.length;
      this.status.textContent = `${number(this.heads.length)} of ${counted(cells.N, word)}, ${number(this.prompts.length)} of ${counted(cells.P, "prompt")}`
        + `${shown < whole ? `, ${number(shown)} of ${counted(whole, "cell")} computed` : ""}: ${counted(sum(worse), "answer")} ${words.worse[1]}, ${number(sum(better))} ${words.better[1]}`;
      this.paintMap();
      this.paintHeat();
      this.listHeads();
      this.listPrompts();
      if (this.head !== null) this.listSentences();
      performance.measure("filter", "filter-start");
    }

    // Of the chosen prompts: the share that the node makes better less the share that it makes worse, or the mean of the
    // quantity; null where nothing was computed.
    effect(h) {
      const { cells, worse, better, sum } = this.counts;
      return cells[h] ? (this.byQuantity ? sum[h] : better[h] - worse[h]) / cells[h] : null;
    }

    colours() {
      return Object.fromEntries(["right", "wrong", "mended", "broken", "missing"].map((name) => [name, colour(`--${name}`)]));
    }

    paintMap() {
      const { map, layers, columns } = this, colours = this.colours(), drawing = map.getContext("2d");
      const side = Math.max(4, Math.min(28, Math.floor(340 / columns), Math.floor(420 / layers) || 4));
      map.width = Math.max(side * columns, 28);
      map.height = side * layers;
      const effects = Array.from(this.all, (h) => this.effect(h));
      const bound = Math.max(...effects.map(Math.abs)) || 1, chosen = new Set(this.heads);
      this.all.forEach((h, i) => {
        const x = this.columnOf(h) * side, y = (layers - 1 - this.cells.data.layers[h]) * side;
        const width = columns === 1 ? map.width : side;
        drawing.fillStyle = effects[i] === null ? colours.missing : mixed(colours.right, effects[i] < 0 ? colours.broken : colours.mended, Math.abs(effects[i]) / bound);
        drawing.globalAlpha = chosen.has(h) ? 1 : 0.3;
        drawing.fillRect(x, y, width - 1, side - 1);
        if (this.decision(h)?.decision === "above") this.dot(drawing, x + width / 2, y + side / 2, side / 6);
        if (h === this.head) {
          drawing.globalAlpha = 1;
          drawing.strokeStyle = colour("--text");
          drawing.lineWidth = 2;
          drawing.strokeRect(x + 1, y + 1, width - 3, side - 3);
        }
      });
      this.mapTitle.textContent = this.byQuantity
        ? `Mean ${this.quantity.title}, up to ${bound.toFixed(2)} ${this.quantity.unit}`
        : `Answers ${this.words.worse[1]} less ${this.words.better[1]}, up to ${(100 * bound).toFixed(1)} points`;
    }

    dot(drawing, x, y, radius) {
      drawing.beginPath();
      drawing.arc(x, y, Math.max(radius, 1.5), 0, 7);
      drawing.fillStyle = "white";
      drawing.fill();
      drawing.lineWidth = 1;
      drawing.strokeStyle = "black";
      drawing.stroke();
    }

    paintHeat() {
      const box = this.heat.parentElement.clientWidth || 600, names = ["broken", "mended", "wrong", "right"];
      this.heat.width = Math.max(200, Math.floor(box));
      this.heat.height = Math.max(120, Math.min(420, this.rows.length * 8));
      if (this.rows.length && this.across.length) {
        this.cells.paint(this.heat, this.rows, this.across, this.byQuantity ? Number(this.coloured.value) : null, this.colours());
      }
      const shown = this.byQuantity ? [["broken", "lower"], ["right", "unchanged"], ["mended", "higher"]]
        : names.map((name, i) => [name, this.words.legend[i]]).filter(([, text]) => text);
      if (this.partly) shown.push(["missing", "not computed"]);
      this.legend.replaceChildren(...shown.map(([name, text]) => make("span", {}, make("i", { class: name }), text)));
    }

    repaint() {
      this.paintMap();
      this.paintHeat();
    }

    outline(canvas, from, to) {
      this.repaint();
      const drawing = canvas.getContext("2d");
      drawing.globalAlpha = 1;
      drawing.strokeStyle = colour("--text");
      drawing.lineWidth = 2;
      drawing.strokeRect(from[0] * canvas.width, from[1] * canvas.height, (to[0] - from[0]) * canvas.width, (to[1] - from[1]) * canvas.height);
    }

    onMap(x, y) {
      const h = this.place.get(`${this.layers - 1 - Math.floor(y * this.layers)}/${Math.floor(x * this.columns)}`);
      if (h === undefined) return [];
      const { cells, worse, better, sum } = this.counts, { words } = this, name = `${this.word} ${this.cells.name(h)}`;
      const decided = this.cells.data.decisions ? [this.decidedWords(h)] : [];
      if (!cells[h]) return [name, "not computed on the chosen prompts", ...decided];
      return [name, `${worse[h]} of ${counted(cells[h], "prompt")} ${words.worse[1]}, ${better[h]} ${words.better[1]}`,
        `${this.quantity.title}: ${amount(sum[h] / cells[h], this.quantity)} per prompt`, ...decided];
    }

    onHeat(x, y) {
      const h = this.rows[Math.floor(y * this.rows.length)], p = this.across[Math.floor(x * this.across.length)];
      if (h === undefined || p === undefined) return [];
      const prompt = this.cells.prompt(p), cell = this.cells.at(h, p), name = `${this.word} ${this.cells.name(h)}`;
      if (!cell) return [name, prompt.text, "not computed"];
      const answers = `right: ${prompt.answer}; answered ${cell.before}${cell.after === null ? "" : `, now ${cell.after}`}`;
      return [name, prompt.text, answers, ...this.cells.data.quantities.map((quantity, k) => `${quantity.title}: ${ofCell(cell.amounts[k], quantity)} ${quantity.unit}`)];
    }

    showTip(event, lines = []) {
      this.tip.hidden = !lines.length;
      if (!lines.length) return;
      this.tip.replaceChildren(...lines.map((line, i) => make(i ? "div" : "strong", { dir: "auto" }, line)));
      this.tip.style.left = `${Math.min(event.clientX + 14, innerWidth - this.tip.offsetWidth - 8)}px`;
      this.tip.style.top = `${Math.min(event.clientY + 14, innerHeight - this.tip.offsetHeight - 8)}px`;
    }
  }

  window.mathinterp.explore = async (room, data) => {
    room.explorer = new Explorer(room, await Cells.of(data));
    return room.explorer;
  };
})();
