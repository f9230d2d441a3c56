"use strict";
// The place to ask SQL: one query that reads, its first rows as a table, all of them as CSV; and what can be asked.
(() => {
  const START = "SELECT run_id, scan, model, prompts, status, shards_done, shards FROM runs";
  const { make } = window.mathinterp;
  const room = document.getElementById("sql");
  let running = null;

  const kept = {
    get: () => { try { return sessionStorage.getItem("mathinterp-sql"); } catch { return null; } },
    set: (value) => { try { sessionStorage.setItem("mathinterp-sql", value); } catch { /* private window */ } },
  };

  const text = make("textarea", { id: "query", rows: 6, spellcheck: "false", autocomplete: "off", autocapitalize: "off", "aria-describedby": "query-hint", onkeydown: keyed });
  const run = make("button", { type: "button", class: "primary", onclick: ask }, "Run");
  const csv = make("button", { type: "button", onclick: download }, "Download CSV");
  const stop = make("button", { type: "button", disabled: true, onclick: () => running?.abort() }, "Stop");
  const status = make("p", { class: "status", role: "status" });
  const notes = make("div", {});
  const table = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Rows of the query" });
  const views = make("div", { class: "views" });

  function keyed(event) {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask();
  }

  async function posted(where) {
    const query = text.value, mine = new AbortController();
    kept.set(query);
    running?.abort(); // Ctrl+Enter also while one runs: the answer shown is that of the last one
    running = mine;
    [run, csv].forEach((button) => { button.disabled = true; });
    stop.disabled = false;
    status.textContent = "Running…";
    notes.replaceChildren();
    try {
      const answer = await fetch(where, {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ query }), signal: mine.signal,
      });
      if (!answer.ok) throw new Error((await answer.json()).error);
      const found = await (where === "sql" ? answer.json() : answer.blob());
      return running === mine ? found : null;
    } catch (error) {
      if (running !== mine) return null;
      table.replaceChildren();
      status.textContent = error.name === "AbortError" ? "Stopped" : error instanceof TypeError ? "The answer broke off: the server ended it, or is gone" : error.message;
      return null;
    } finally {
      if (running === mine) ended();
    }
  }

  function ended() {
    running = null;
    [run, csv].forEach((button) => { button.disabled = false; });
    stop.disabled = true;
  }

  async function ask() {
    const answer = await posted("sql");
    if (!answer) return;
    status.textContent = answer.told;
    notes.replaceChildren(...answer.notes.map((note) => make("p", { class: "warning" }, note)));
    const cell = (tag, more) => (value, place) => make(tag, { dir: "auto", class: answer.numbers[place] ? null : "words", ...more }, make("div", {}, value));
    table.replaceChildren(make("table", {},
      make("thead", {}, make("tr", {}, ...answer.columns.map(cell("th", { scope: "col" })))),
      make("tbody", {}, ...answer.rows.map((row) => make("tr", {}, ...row.map(cell("td", {})))))));
  }

  async function download() {
    const file = await posted("sql.csv");
    if (!file) return;
    const link = make("a", { href: URL.createObjectURL(file), download: "query.csv" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    status.textContent = `Saved query.csv, ${file.size.toLocaleString("en")} bytes`;
  }

  function put(query) {
    text.value = query;
    location.hash = "#sql";
    text.focus();
  }

  function described(view) {
    const rows = view.rows == null ? "" : `, ${view.rows.toLocaleString("en")} rows`;
    const query = `SELECT * FROM ${view.view} LIMIT 50`;
    return make("details", {},
      make("summary", {}, make("code", {}, view.view), rows),
      make("p", {}, view.about), make("p", {}, make("code", {}, view.columns.join(", "))),
      make("button", { type: "button", onclick: () => put(query) }, "Ask this"));
  }

  async function list() {
    let found;
    try {
      const answer = await fetch("views");
      found = await answer.json();
      if (!answer.ok) throw new Error(found.error);
    } catch (error) {
      views.replaceChildren(make("p", { class: "warning" }, `The views cannot be listed: ${error.message}`));
      return;
    }
    const search = make("input", { type: "search", id: "view-search", placeholder: "for example effects", oninput: () => {
      const word = search.value.toLowerCase();
      for (const [place, each] of [...views.children].entries()) {
        const { view, about, columns } = found[place];
        each.hidden = !`${view} ${about} ${columns.join(" ")}`.toLowerCase().includes(word);
      }
    } });
    views.replaceChildren(...found.map(described));
    views.before(make("label", { for: "view-search" }, `${found.length} views, and what they say`), search);
  }

  function copied() { // beside the SQL of each run, a way to ask it here
    for (const button of document.querySelectorAll('.copy[data-from^="sql-"]:not(.asked)')) {
      button.classList.add("asked");
      const query = () => document.getElementById(button.dataset.from).textContent.split(";\n")[0];
      button.after(make("button", { type: "button", onclick: () => put(query()) }, "Ask here"));
    }
  }

  text.value = kept.get() || START;
  room.setAttribute("aria-labelledby", "sql-title");
  room.append(
    make("h2", { id: "sql-title" }, "SQL"),
    make("div", { class: "card" },
      make("label", { for: "query" }, "One query that reads (DuckDB)"),
      text,
      make("p", { id: "query-hint", class: "hint" }, "Ctrl+Enter runs it. Accuracies, drops, effects and shares are fractions of 1. Nothing but this store can be read, and nothing written."),
      make("div", { class: "buttons" }, run, stop, csv), status, notes, table),
    make("div", { class: "card" }, make("h3", {}, "What can be asked"), views));
  copied();
  new MutationObserver(copied).observe(document.getElementById("main"), { childList: true });
  list();
})();
