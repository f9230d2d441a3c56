"use strict";
// Exploring a grid: choose components to see which sentences break, choose sentences to see which components matter.
(() => {
  const { Cells, mixed, colour, say, make } = window.mathinterp;
  const ROWS = 15, SENTENCES = 50;

  const nats = (value) => (Math.abs(value) < 0.005 ? "0.00" : `${value > 0 ? "+" : ""}${value.toFixed(2)}`);
  const counted = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
  const labelled = (text, control) => {
    control.setAttribute("aria-label", text); // else the label's name would have the choices in it
    return make("label", {}, make("span", {}, text), control);
  };

  class Explorer {
    constructor(room, cells) {
      Object.assign(this, { room, cells, word: cells.data.word, head: null, more: SENTENCES, cursor: [0, 0] });
      this.all = Int32Array.from({ length: cells.N }, (_, h) => h);
      this.operations = [...new Set(cells.data.prompts.map((prompt) => prompt[4]))];
      this.texts = cells.data.prompts.map(([id, text]) => `${text} ${id}`.toLowerCase());
      this.layers = Math.max(...cells.data.layers) + 1;
      this.columns = Math.max(...cells.data.heads, 0) + 1;
      this.place = new Map(Array.from(this.all, (h) => [`${cells.data.layers[h]}/${Math.max(cells.data.heads[h], 0)}`, h]));
      this.build();
      this.reset();
      document.addEventListener("recoloured", () => this.update());
    }

    // ---- what is on the page ----

    build() {
      const { word } = this, redo = () => this.filter();
      this.operation = make("select", { onchange: redo }, ...["all", ...this.operations].map((name) => make("option", {}, name)));
      this.text = make("input", { type: "search", placeholder: "for example 17 +", oninput: redo });
      this.named = make("input", { type: "search", placeholder: this.cells.data.heads[0] < 0 ? "for example 0, 3" : "for example 0.6, 3", oninput: redo });
      this.quantity = make("select", { onchange: () => this.update() },
        make("option", { value: "" }, "answers"), make("option", { value: "change" }, "log-probability"));
      this.order = make("select", { onchange: () => this.update() },
        make("option", { value: "" }, "as numbered"), make("option", { value: "worst" }, "most broken first"));
      const clear = make("button", { type: "button", onclick: () => this.reset() }, "Choose all again");
      this.status = make("p", { class: "status", role: "status" });
      this.map = this.canvas(`${word}s by layer, coloured by what they do to the chosen prompts`, (box) => this.chooseOnMap(box), (x, y) => this.onMap(x, y));
      this.heat = this.canvas(`${word}s by prompts; arrow keys move, Enter lists what the ${word} breaks`, (box) => this.chooseOnHeat(box), (x, y) => this.onHeat(x, y));
      this.heat.addEventListener("keydown", (event) => this.keyed(event));
      this.mapTitle = make("h4", {});
      this.legend = make("div", { class: "legend" });
      this.worstHeads = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${word}s that matter` });
      this.worstPrompts = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "prompts that break" });
      this.sentences = make("div", { class: "sentences" });
      this.tip = make("div", { class: "tip", hidden: true });
      this.room.replaceChildren(
        make("div", { class: "controls" }, labelled("Operation", this.operation), labelled("Sentences with", this.text),
          labelled(`${word[0].toUpperCase()}${word.slice(1)}s`, this.named), labelled("Colour", this.quantity), labelled("Order", this.order), clear),
        this.status,
        make("div", { class: "panels" },
          make("div", {}, this.mapTitle, this.map, make("p", { class: "hint" }, `Layer 0 is below. Drag to choose ${word}s, click for one ${word}'s sentences.`)),
          make("div", {}, make("h4", {}, `${word}s (down) by prompts (across)`), this.heat, this.legend,
            make("p", { class: "hint" }, "Drag to choose, click a cell for its sentences."))),
        make("div", { class: "panels even" },
          make("div", {}, make("h4", {}, `${word}s that break most of the chosen prompts`), this.worstHeads),
          make("div", {}, make("h4", {}, `Prompts that most of the chosen ${word}s break`), this.worstPrompts)),
        this.sentences, this.tip, make("p", { class: "hint" }, this.precision()));
    }

    precision() {
      const { bound, error, attention } = this.cells.data;
      const left = attention?.left_out
        ? ` Attention: only of the ${counted(attention.heads.length, "head")} that matter most; ${counted(attention.left_out, "other")} left out for size (run ${attention.run} has them).`
        : "";
      return `An answer is what the model predicts at each counted token, the right ones before it given; it is right if every one is.`
        + ` Changes of log-probability are kept in 255 steps of ± (k/127)² × ${bound.toPrecision(4)} nats, off by at most ${error.toPrecision(2)}.${left}`;
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
      this.text.value = this.named.value = "";
      this.brushedHeads = this.brushedPrompts = null;
      this.filter();
    }

    filter() {
      const operation = this.operation.value, text = this.text.value.trim().toLowerCase(), { prompts } = this.cells.data;
      const within = this.brushedPrompts ?? prompts.keys();
      this.prompts = Int32Array.from([...within].filter((p) =>
        (operation === "all" || prompts[p][4] === operation) && (!text || this.texts[p].includes(text))));
      const named = this.named.value.split(/[\s,]+/).filter(Boolean);
      const heads = this.brushedHeads ?? this.all;
      this.heads = named.length ? heads.filter((h) => named.some((name) => name === this.cells.name(h) || name === `${this.cells.data.layers[h]}`)) : heads;
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
      const { cells, word } = this;
      this.counts = cells.count(this.heads, this.prompts);
      const { broken, mended, brokenAt } = this.counts;
      this.rows = [...this.heads];
      this.across = [...this.prompts];
      if (this.order.value) {
        this.rows.sort((a, b) => broken[b] - broken[a] || a - b);
        this.across.sort((a, b) => brokenAt[b] - brokenAt[a] || a - b);
      }
      const sum = (counts) => this.heads.reduce((total, h) => total + counts[h], 0);
      this.status.textContent = `${this.heads.length.toLocaleString("en")} of ${counted(cells.N, word)}, ${this.prompts.length.toLocaleString("en")} of ${counted(cells.P, "prompt")}: ${counted(sum(broken), "answer")} broken, ${sum(mended).toLocaleString("en")} mended`;
      this.paintMap();
      this.paintHeat();
      this.listHeads();
      this.listPrompts();
      if (this.head !== null) this.listSentences();
      performance.measure("filter", "filter-start");
    }

    // Of the chosen prompts: the share that the component breaks less the share that it mends, or the mean change.
    effect(h) {
      const { cells, broken, mended, change } = this.counts;
      return cells[h] ? (this.quantity.value ? change[h] : mended[h] - broken[h]) / cells[h] : null;
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
        const x = Math.max(this.cells.data.heads[h], 0) * side, y = (layers - 1 - this.cells.data.layers[h]) * side;
        const width = this.cells.data.heads[h] < 0 ? map.width : side;
        drawing.fillStyle = effects[i] === null ? colours.missing : mixed(colours.right, effects[i] < 0 ? colours.broken : colours.mended, Math.abs(effects[i]) / bound);
        drawing.globalAlpha = chosen.has(h) ? 1 : 0.3;
        drawing.fillRect(x, y, width - 1, side - 1);
        if (h === this.head) {
          drawing.globalAlpha = 1;
          drawing.strokeStyle = colour("--text");
          drawing.lineWidth = 2;
          drawing.strokeRect(x + 1, y + 1, width - 3, side - 3);
        }
      });
      const most = this.quantity.value ? `${bound.toFixed(2)} nats` : `${(100 * bound).toFixed(1)} points`;
      this.mapTitle.textContent = this.quantity.value
        ? `Mean change of log-probability, up to ${most}` : `Answers broken less mended, up to ${most}`;
    }

    paintHeat() {
      const box = this.heat.parentElement.clientWidth || 600;
      this.heat.width = Math.max(200, Math.floor(box));
      this.heat.height = Math.max(120, Math.min(420, this.rows.length * 8));
      if (this.rows.length && this.across.length) this.cells.paint(this.heat, this.rows, this.across, Boolean(this.quantity.value), this.colours());
      const shown = this.quantity.value ? [["broken", "less probable"], ["right", "unchanged"], ["mended", "more probable"]]
        : [["broken", "right → wrong"], ["mended", "wrong → right"], ["wrong", "wrong → wrong"], ["right", "right → right"]];
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
      if (h === undefined || !this.counts.cells[h]) return [];
      const { cells, broken, mended, change } = this.counts;
      return [`${this.word} ${this.cells.name(h)}`, `${broken[h]} of ${counted(cells[h], "prompt")} broken, ${mended[h]} mended`,
        `${nats(change[h] / cells[h])} nats per prompt`];
    }

    onHeat(x, y) {
      const h = this.rows[Math.floor(y * this.rows.length)], p = this.across[Math.floor(x * this.across.length)];
      if (h === undefined || p === undefined) return [];
      const prompt = this.cells.prompt(p), cell = this.cells.at(h, p);
      if (!cell) return [`${this.word} ${this.cells.name(h)}`, prompt.text, "no row"];
      return [`${this.word} ${this.cells.name(h)}`, prompt.text, `right: ${prompt.answer}; answered ${cell.before}, now ${cell.after}`, `${nats(cell.change)} nats`];
    }

    showTip(event, lines = []) {
      this.tip.hidden = !lines.length;
      if (!lines.length) return;
      this.tip.replaceChildren(...lines.map((line, i) => make(i ? "div" : "strong", { dir: "auto" }, line)));
      this.tip.style.left = `${Math.min(event.clientX + 14, innerWidth - this.tip.offsetWidth - 8)}px`;
      this.tip.style.top = `${Math.min(event.clientY + 14, innerHeight - this.tip.offsetHeight - 8)}px`;
    }

    table(caption, names, rows) {
      return make("table", {}, make("caption", {}, caption), make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", { dir: "auto" }, cell))))));
    }

    listHeads() {
      const { cells, broken, mended, change } = this.counts;
      const first = [...this.heads].filter((h) => cells[h]).sort((a, b) => (broken[b] - mended[b]) - (broken[a] - mended[a]) || change[a] - change[b]).slice(0, ROWS);
      this.worstHeads.replaceChildren(this.table(`First ${first.length} of ${counted(this.heads.length, this.word)}`,
        [this.word, "broken", "mended", "of", "nats per prompt"],
        first.map((h) => [this.button(h), `${broken[h]}`, `${mended[h]}`, `${cells[h]}`, nats(change[h] / cells[h])])));
    }

    button(h) {
      return make("button", { type: "button", class: "link", onclick: () => this.drill(h), "aria-label": `Sentences of ${this.word} ${this.cells.name(h)}` }, this.cells.name(h));
    }

    listPrompts() {
      const { brokenAt, mendedAt } = this.counts;
      const first = [...this.prompts].filter((p) => brokenAt[p]).sort((a, b) => brokenAt[b] - brokenAt[a] || a - b).slice(0, ROWS);
      this.worstPrompts.replaceChildren(this.table(`First ${first.length}`, ["sentence", "answer", "broken by", "mended by"], first.map((p) => {
        const { text, answer } = this.cells.prompt(p);
        const only = () => { this.brushedPrompts = Int32Array.of(p); this.brushedHeads = null; this.filter(); };
        return [make("button", { type: "button", class: "link", onclick: only, "aria-label": `Only this sentence: ${text}` }, text), answer, `${brokenAt[p]}`, `${mendedAt[p]}`];
      })));
    }

    // ---- one component's sentences ----

    drill(h) {
      this.head = h;
      this.more = SENTENCES;
      this.paintMap();
      this.listSentences();
      this.sentences.scrollIntoView({ block: "nearest" });
      this.sentences.querySelector("h4").focus({ preventScroll: true });
    }

    listSentences() {
      const h = this.head, { cells } = this;
      const fallen = [...this.prompts].map((p) => [p, cells.at(h, p)]).filter(([, cell]) => cell?.rightBefore && !cell.rightAfter).sort((a, b) => a[1].change - b[1].change);
      const title = make("h4", { tabindex: -1 }, `${this.word} ${cells.name(h)} breaks ${counted(fallen.length, "sentence")} of the chosen ${this.prompts.length.toLocaleString("en")}`);
      const attended = Boolean(cells.attended?.has(h));
      const rows = fallen.slice(0, this.more).map(([p, cell]) => {
        const { text, answer, operation } = cells.prompt(p);
        return [text, operation, answer, cell.before, make("b", { class: "fallen" }, cell.after), nats(cell.change), ...(attended ? [this.bars(h, p)] : [])];
      });
      const table = this.table("Largest losses first", ["sentence", "operation", "right", "answered", "now", "nats", ...(attended ? ["attention of the head, by token type"] : [])], rows);
      const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Sentences of ${this.word} ${cells.name(h)}` }, table);
      const more = fallen.length > this.more ? make("button", { type: "button", onclick: () => { this.more *= 4; this.listSentences(); } }, `Show more of ${fallen.length.toLocaleString("en")}`) : null;
      this.sentences.replaceChildren(title, ...(rows.length ? [scroll] : []), ...(more ? [more] : []), ...(attended || !rows.length || this.word !== "head" ? [] : [make("p", { class: "hint" }, this.noAttention())]));
    }

    noAttention() {
      return this.cells.data.attention ? "This head's attention is left out for size." : "An attention scan of this model on these sentences would show here what the head attends to.";
    }

    bars(h, p) {
      const found = this.cells.attention(h, p);
      if (!found) return "not scanned";
      return make("span", { class: "bars" }, ...found.slice(0, 3).map(({ type, mass }) => {
        const bar = make("i", {});
        bar.style.width = `${Math.round(60 * mass)}px`;
        return make("span", {}, bar, `${type} ${(100 * mass).toFixed(0)} %`);
      }));
    }
  }

  window.mathinterp.explore = async (room, data) => {
    room.explorer = new Explorer(room, await Cells.of(data));
    return room.explorer;
  };
})();
