"use strict";
// The tables of an explorer: the nodes and the prompts that matter, and the sentences of one node. Its host chooses.
(() => {
  const { make } = window.mathinterp;
  const ROWS = 15, SENTENCES = 50;

  const number = (value) => value.toLocaleString("en");
  const counted = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
  const rounded = (value, digits = 2) => (Math.abs(value) < 0.5 / 10 ** digits ? (0).toFixed(digits) : `${value > 0 ? "+" : "−"}${Math.abs(value).toFixed(digits)}`);
  const ofCell = (value, { error }) => rounded(value, error >= 0.5 ? 0 : error >= 0.05 ? 1 : 2); // not finer than its step
  const amount = (value, { unit }) => `${rounded(value)} ${unit}`;
  const percent = (share) => (share < 0.001 ? "< 0.1 %" : `${(100 * share).toPrecision(3)} %`);

  class Lists {
    table(caption, names, rows) {
      return make("table", {}, make("caption", {}, caption), make("thead", {}, make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", { dir: "auto" }, cell))))));
    }

    // ---- what matters ----

    listHeads() {
      const { cells, worse, better, sum } = this.counts, { unit } = this.quantity, decided = this.cells.data.decisions;
      const first = [...this.heads].filter((h) => cells[h]).sort((a, b) => this.effect(a) - this.effect(b) || sum[a] / cells[a] - sum[b] / cells[b] || a - b).slice(0, ROWS);
      const [harmed, helped] = [this.words.worse[1], this.words.better[1]];
      this.worstHeads.replaceChildren(this.table(`First ${first.length} of ${counted(this.heads.length, this.word)}`,
        [this.word, harmed, helped, "of", `${unit} per prompt`, ...(decided ? ["decision", `estimate, ${decided.unit}`] : [])],
        first.map((h) => [this.button(h), `${worse[h]}`, `${better[h]}`, number(cells[h]), rounded(sum[h] / cells[h]), ...(decided ? this.decidedCells(h) : [])])));
    }

    button(h) {
      return make("button", { type: "button", class: "link", onclick: () => this.drill(h), "aria-label": `Sentences of ${this.word} ${this.cells.name(h)}` }, this.cells.name(h));
    }

    listPrompts() {
      const { worseAt, betterAt, absentAt, sumAt } = this.counts, computed = (p) => this.heads.length - absentAt[p];
      const by = this.byQuantity ? (p) => sumAt[p] / computed(p) : (p) => -worseAt[p];
      const first = [...this.prompts].filter((p) => computed(p) && by(p) < 0).sort((a, b) => by(a) - by(b) || a - b).slice(0, ROWS);
      const mean = this.byQuantity ? [`${this.quantity.unit} per ${this.word}`] : [];
      this.worstPrompts.replaceChildren(this.table(`First ${first.length}`, ["sentence", "answer", `${this.words.worse[1]} by`, `${this.words.better[1]} by`, "of", ...mean], first.map((p) => {
        const { text, answer } = this.cells.prompt(p);
        const only = () => { this.brushedPrompts = Int32Array.of(p); this.brushedHeads = null; this.filter(); };
        return [make("button", { type: "button", class: "link", onclick: only, "aria-label": `Only this sentence: ${text}` }, text), answer, `${worseAt[p]}`, `${betterAt[p]}`,
          number(computed(p)), ...(this.byQuantity ? [rounded(sumAt[p] / computed(p))] : [])];
      })));
    }

    // ---- decisions ----

    decision(h) {
      return this.cells.data.decisions?.rows[h] ?? null;
    }

    decidedCells(h) {
      const found = this.decision(h);
      return found ? [found.decision, found.exact || found.low === null ? `${found.estimate}` : `${found.estimate} (${found.low} to ${found.high})`] : ["none", "-"];
    }

    decidedWords(h) {
      const found = this.decision(h), { unit } = this.cells.data.decisions;
      if (!found) return `No decision about ${this.word} ${this.cells.name(h)} yet.`;
      const how = found.exact ? "certain" : `interval ${found.low} to ${found.high}, which holds at every look`;
      return `Decided after ${number(found.prompts_used)} of ${counted(found.cells, "prompt")}: ${found.decision} ${found.threshold} ${unit}; the drop is estimated as ${found.estimate} ${unit}, ${how}.`;
    }

    // ---- one node's sentences ----

    drill(h) {
      this.head = h;
      this.more = SENTENCES;
      this.paintMap();
      this.listSentences();
      this.sentences.scrollIntoView({ block: "nearest" });
      this.sentences.querySelector("h4").focus({ preventScroll: true });
    }

    listSentences() {
      const h = this.head, { cells } = this, { data } = cells, own = this.counts.cells[h];
      const found = [...this.prompts].map((p) => [p, cells.at(h, p)]).filter(([, cell]) => cell?.worse).sort((a, b) => a[1].amounts[0] - b[1].amounts[0]);
      const within = own < this.prompts.length ? `the ${number(own)} computed of the chosen` : "the chosen";
      const title = make("h4", { tabindex: -1 }, `${this.word} ${cells.name(h)} ${this.words.worse[0]}s ${counted(found.length, "sentence")} of ${within} ${number(this.prompts.length)}`);
      const attended = Boolean(cells.attended?.has(h));
      const names = ["sentence", ...data.extras, "operation", "right", "answered", ...(data.answers ? ["now"] : []), ...(data.logprobs ? ["chance of the right one"] : []),
        ...data.quantities.map(({ title: name, unit }) => (data.quantities.length > 1 ? `${name}, ${unit}` : unit)), ...(attended ? ["attention of the head, by token type"] : [])];
      const rows = found.slice(0, this.more).map(([p, cell]) => {
        const { text, answer, operation, extras } = cells.prompt(p);
        return [text, ...extras, operation, answer, cell.before, ...(data.answers ? [make("b", { class: "fallen" }, cell.after)] : []),
          ...(data.logprobs ? [make("b", { class: "fallen" }, cell.chances.map(percent).join(" → "))] : []), ...cell.amounts.map((value, k) => ofCell(value, data.quantities[k])), ...(attended ? [this.bars(h, p)] : [])];
      });
      const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Sentences of ${this.word} ${cells.name(h)}` }, this.table("Largest losses first", names, rows));
      const more = found.length > this.more ? make("button", { type: "button", onclick: () => { this.more *= 4; this.listSentences(); } }, `Show more of ${number(found.length)}`) : null;
      const said = data.decisions ? [make("p", {}, this.decidedWords(h))] : [];
      this.sentences.replaceChildren(title, ...said, ...(rows.length ? [scroll] : []), ...(more ? [more] : []), ...(attended || !rows.length || data.heads[h] < 0 ? [] : [make("p", { class: "hint" }, this.noAttention())]));
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

  Object.assign(window.mathinterp, { Lists, counted, amount, ofCell, number });
})();
