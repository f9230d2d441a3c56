"use strict";
// The page: one view at a time, its charts drawn when seen, copying, saving, light and dark.
(() => {
  const given = { figures: new Map(), grids: new Map() };
  const drawn = new Map(); // figure element -> Vega's view
  const one = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // ---- data: scripts, since a page from a file may fetch nothing ----

  const scripts = new Map();
  function load(name) {
    if (!scripts.has(name)) {
      scripts.set(name, new Promise((done, failed) => {
        const script = document.createElement("script");
        script.src = `assets/${name}.js`;
        script.onload = done;
        script.onerror = () => failed(new Error(`assets/${name}.js is not beside this page`));
        document.head.append(script);
      }));
    }
    return scripts.get(name);
  }

  function say(text) {
    const line = one("#said");
    line.textContent = text;
    clearTimeout(say.timer);
    say.timer = setTimeout(() => { line.textContent = ""; }, 4000);
  }

  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.filter((child) => child != null));
    return element;
  }

  // ---- charts ----

  function isDark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Steps between two colours: between two alone Vega goes by way of other hues.
  const ramp = (from, to) => Array.from({ length: 17 }, (_, i) => i / 16).map((share) => window.mathinterp.mixed(from, to, share));

  function vegaConfig() {
    const [text, line, card, good, none, bad] = ["--text", "--line", "--card", "--mended", "--right", "--broken"].map(colour);
    const font = "system-ui, sans-serif";
    const words = { labelColor: text, titleColor: text, labelFont: font, titleFont: font, titleFontWeight: 500 };
    return {
      background: card,
      font,
      range: { diverging: [...ramp(good, none), ...ramp(none, bad).slice(1)], heatmap: ramp(none, good), ramp: ramp(none, good) },
      title: { color: text, subtitleColor: text, fontWeight: 600 },
      axis: { ...words, domainColor: line, tickColor: line, gridColor: line },
      legend: words,
      header: words,
      view: { stroke: line },
      text: { color: text },
      rule: { color: text },
    };
  }

  // Data that came as columns, as rows.
  function asRows(value) {
    if (!value?.columns || Array.isArray(value)) return value;
    const names = Object.keys(value.columns);
    return value.columns[names[0]].map((_, i) => Object.fromEntries(names.map((name) => [name, value.columns[name][i]])));
  }

  // The chart with rows, and as many panels in a row as there is room for.
  function fitted(spec, width) {
    const copy = structuredClone(spec);
    delete copy.config?.range; // colours are those of the page, light or dark
    for (const name in copy.datasets ?? {}) copy.datasets[name] = asRows(copy.datasets[name]);
    if (copy.columns) copy.columns = balanced(copy.facet?.sort?.length ?? copy.concat?.length ?? copy.columns, Math.floor(width / (widest(copy) + 50)));
    return copy;
  }

  const widest = (spec) => Math.max(180, ...[spec.spec, ...(spec.concat ?? [])].map((part) => (part ? part.width ?? part.spec?.width ?? 250 : 0)));

  // Of so many panels those in a row, so that the last row is not left with one alone.
  function balanced(panels, most) {
    const rows = Math.ceil(panels / Math.max(1, most));
    return Math.max(1, Math.ceil(panels / rows));
  }

  async function draw(figure) {
    const key = figure.dataset.key;
    const place = one(".drawn", figure);
    try {
      await Promise.all([load("vega"), load(`data/${key}`)]);
      drawn.get(figure)?.finalize();
      const result = await window.vegaEmbed(place, fitted(given.figures.get(key), place.clientWidth), {
        mode: "vega-lite",
        renderer: "canvas",
        actions: false,
        ast: true, // no eval, which the page's policy forbids
        defaultStyle: false,
        config: vegaConfig(),
        tooltip: { theme: isDark() ? "dark" : "light", disableDefaultStyle: true },
      });
      drawn.set(figure, result);
      figure.classList.add("done");
    } catch (error) {
      place.textContent = `This chart could not be drawn: ${error.message}`;
      throw error;
    }
  }

  // A small picture of a chart: its first panel, marks alone.
  function reduced(spec) {
    let part = structuredClone(spec);
    const { datasets } = part;
    for (const name in datasets ?? {}) datasets[name] = asRows(datasets[name]);
    while (part.spec || part.concat || part.vconcat || part.hconcat) {
      const inner = part.spec ?? (part.concat ?? part.vconcat ?? part.hconcat)[0];
      inner.data ??= part.data;
      if (part.facet?.sort) inner.transform = [{ filter: { field: part.facet.field, equal: part.facet.sort[0] } }, ...(inner.transform ?? [])];
      part = inner;
    }
    return { ...bare(part), $schema: spec.$schema, datasets, title: undefined, width: 120, height: 98, padding: 4, autosize: { type: "fit", contains: "padding" } };
  }

  // Marks without axes, legends, words and tooltips.
  function bare(part) {
    const { encoding = {}, layer, width, height, ...rest } = part;
    const kept = Object.entries(encoding).filter(([channel]) => !["tooltip", "text"].includes(channel))
      .map(([channel, each]) => [channel, ["x", "y"].includes(channel) ? { ...each, axis: null } : each.field && !/^[xy]/.test(channel) ? { ...each, legend: null } : each]);
    const inner = layer?.filter(({ mark }) => (mark?.type ?? mark) !== "text").map(bare);
    return { ...rest, encoding: Object.fromEntries(kept), ...(inner ? { layer: inner } : {}) };
  }

  const small = new Map(); // place of a thumbnail -> Vega's view
  async function drawSmall(place) {
    const { key } = place.dataset;
    await Promise.all([load("vega"), load(`data/${key}`)]);
    small.get(place)?.finalize();
    small.set(place, await window.vegaEmbed(place, reduced(given.figures.get(key)), {
      mode: "vega-lite", renderer: "canvas", actions: false, ast: true, defaultStyle: false, tooltip: false, config: vegaConfig(),
    }));
  }

  async function save(figure, kind) {
    const result = drawn.get(figure);
    if (!result) return;
    const link = document.createElement("a");
    link.href = await result.view.toImageURL(kind, kind === "png" ? 2 : 1);
    link.download = `${figure.dataset.name}.${kind}`;
    link.click();
    say(`Saved ${link.download}`);
  }

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((each) => each.isIntersecting)) {
      seen.unobserve(entry.target);
      if (entry.target.matches(".thumbnail")) drawSmall(entry.target);
      else draw(entry.target);
    }
  }, { rootMargin: "200px" });

  // ---- views ----

  function show(moved = true) {
    const asked = decodeURIComponent(location.hash.slice(1));
    const views = all(".view");
    const known = views.some((view) => view.id === asked);
    if (asked && !known) return; // a place within a view
    const chosen = known ? asked : views[0].id;
    for (const view of views) view.hidden = view.id !== chosen;
    for (const link of all("nav a")) {
      if (link.getAttribute("href") === `#${chosen}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (moved) openMenu(false);
    if (known && moved) {
      scrollTo(0, 0);
      one("#main").focus({ preventScroll: true });
    }
  }

  function openMenu(open) {
    document.body.classList.toggle("menu", open);
    one("#menu").setAttribute("aria-expanded", String(open));
  }

  // ---- light and dark ----

  const THEMES = ["auto", "light", "dark"];
  const kept = {
    get: () => { try { return localStorage.getItem("mathinterp-theme"); } catch { return null; } },
    set: (value) => { try { localStorage.setItem("mathinterp-theme", value); } catch { /* private window */ } },
  };

  function setTheme(theme) {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    one("#theme").textContent = `Theme: ${theme}`;
    one("#theme").dataset.theme = theme;
    recolour();
  }

  function recolour() {
    for (const figure of drawn.keys()) draw(figure);
    for (const place of small.keys()) drawSmall(place);
    document.dispatchEvent(new Event("recoloured"));
  }

  // ---- copying ----

  async function copy(id) {
    const place = document.getElementById(id);
    try {
      await navigator.clipboard.writeText(place.textContent);
      say("Copied");
    } catch {
      getSelection().selectAllChildren(place);
      say(document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C to copy");
    }
  }

  function clicked(event) {
    const button = event.target.closest("button");
    if (button?.matches(".copy")) copy(button.dataset.from);
    else if (button?.matches(".save")) save(button.closest("figure"), button.dataset.kind);
    else if (button?.id === "menu") openMenu(button.getAttribute("aria-expanded") !== "true");
    else if (button?.id === "theme") {
      const next = THEMES[(THEMES.indexOf(button.dataset.theme) + 1) % THEMES.length];
      kept.set(next);
      setTheme(next);
    } else if (button?.matches(".grid > .open")) openGrid(button.parentElement, button);
  }

  async function openGrid(card, button) {
    button.disabled = true;
    button.textContent = "Loading…";
    await load(`data/${card.dataset.key}`);
    const room = one(".room", card);
    room.hidden = false;
    await window.mathinterp.explore(room, given.grids.get(card.dataset.key));
    button.remove();
  }

  // A view that was put on the page after it was read: its data are loaded anew when they are needed.
  function added(view) {
    const key = view.id.replace(/^run-/, "");
    for (const name of [`data/${key}`, `data/${key}-figure`]) scripts.delete(name);
    for (const views of [drawn, small]) {
      for (const place of [...views.keys()].filter((each) => !each.isConnected)) {
        views.get(place).finalize();
        views.delete(place);
      }
    }
    for (const figure of all("figure.chart, .thumbnail", view)) seen.observe(figure);
    show(false);
  }

  window.mathinterp = {
    make,
    added,
    figure: (key, spec) => given.figures.set(key, spec),
    grid: (key, data) => given.grids.set(key, data),
    colour,
    say,
  };

  document.documentElement.classList.add("js");
  setTheme(THEMES.includes(kept.get()) ? kept.get() : "auto");
  document.addEventListener("click", clicked);
  addEventListener("hashchange", show);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  document.addEventListener("DOMContentLoaded", () => {
    show();
    for (const figure of all("figure.chart, .thumbnail")) seen.observe(figure);
    performance.mark("interactive");
  });
})();
