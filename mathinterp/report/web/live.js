"use strict";
// Runs that are still computed: how far they are, and what is finished meanwhile put on the page where nobody reads.
(() => {
  const EVERY = 2000; // milliseconds
  const one = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const served = new Map(all(".view").map((view) => [view.id, view.outerHTML])); // as the server wrote them
  let tag = "", shown = document.body.dataset.version, offered = new Map();

  const place = document.createElement("aside");
  place.id = "live";
  place.className = "live";
  place.setAttribute("aria-label", "Runs that are not finished");
  place.hidden = true;
  one("#main").prepend(place);
  const news = document.createElement("p");
  news.setAttribute("role", "status");
  const offer = Object.assign(document.createElement("button"), { type: "button", textContent: "Show the new results", hidden: true });
  offer.addEventListener("click", () => take(true));
  const list = document.createElement("ul");
  place.append(news, offer, list);

  function row(run) {
    const line = document.createElement("li"), code = document.createElement("code"), name = document.createElement("bdi");
    const bar = Object.assign(document.createElement("progress"), { max: Math.max(run.shards, 1), value: run.done });
    code.textContent = run.run;
    name.textContent = `${run.scan}: ${run.model} on ${run.prompts}`;
    bar.setAttribute("aria-label", `${run.run}: ${run.done} of ${run.shards} shards`);
    line.append(code, " ", name, " ", bar, ` ${run.done} of ${run.shards} shards, ${run.status}`);
    return line;
  }

  // What the page itself said of them when it was made is older.
  function hideOlder(runs) {
    for (const line of all("li[data-run]")) line.hidden = runs.has(line.dataset.run);
    for (const older of all("ul:has(> li[data-run])")) {
      older.hidden = older.previousElementSibling.hidden = !all("li:not([hidden])", older).length;
    }
    for (const alert of all("aside.alert")) alert.hidden = !all(":scope > ul:not([hidden])", alert).length;
  }

  function tell() {
    place.hidden = !list.children.length && !news.textContent && offer.hidden;
  }

  // Views of another version of the page: those that nobody looks at are taken at once, the one that is read when asked.
  async function take(asked) {
    const answer = await fetch("./", { cache: "no-store" });
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const added = [];
    for (const view of all(".view", page).filter((each) => each.id !== "sql")) {
      const here = document.getElementById(view.id);
      if (served.get(view.id) === view.outerHTML) continue;
      if (here && !here.hidden && view.id !== "overview" && !asked) {
        offered.set(view.id, true);
        continue;
      }
      served.set(view.id, view.outerHTML);
      offered.delete(view.id);
      if (!here) added.push(one("h2", view).textContent);
      const kept = document.importNode(view, true);
      if (here) here.replaceWith(kept);
      else one("#main").append(kept);
      window.mathinterp.added(kept);
    }
    const ids = new Set(all(".view", page).map((view) => view.id));
    for (const gone of all(".view").filter((view) => !ids.has(view.id) && view.hidden)) gone.remove();
    one("#runs").replaceChildren(...document.importNode(one("#runs", page), true).children);
    window.mathinterp.added(one("#overview"));
    shown = page.body.dataset.version;
    offer.hidden = !offered.size;
    if (added.length) news.textContent = `New on this page: ${added.join("; ")}`;
    tell();
  }

  async function look() {
    try {
      const answer = await fetch("state", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 401) {
        news.textContent = "This page is no longer served with the token that it was opened with.";
        tell();
        return; // for good
      }
      if (answer.status >= 400) throw new Error((await answer.json()).error); // for example: the store is away
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") ?? "";
        const state = await answer.json();
        list.replaceChildren(...state.others.map(row));
        hideOlder(new Set(state.others.map((run) => run.run)));
        document.body.dataset.now = state.version;
        tell();
      }
      if (document.body.dataset.now && document.body.dataset.now !== shown) await take(false);
      if (place.classList.contains("away")) news.textContent = "";
      place.classList.remove("away");
    } catch (error) {
      news.textContent = `${error instanceof TypeError ? "The server does not answer" : error.message}; what is here is as of before.`;
      place.classList.add("away");
    }
    tell();
    setTimeout(look, document.hidden ? 5 * EVERY : EVERY);
  }

  document.addEventListener("DOMContentLoaded", look);
})();
