// The list of runs: filter, sort, group, select; live.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { get } from "./api.js";
import { html, ErrorBox, Status, metricsText, number, useAnswer, when } from "./show.js";
import { change, go, isForPage, link } from "./route.js";

const COLUMNS = [["run", "run"], ["status", "status"], ["step", "step"], ["", "metrics"], ["started_t", "started"], ["weights_sha256", "weights"]];
const LIVE_MS = 2000;
const ROWS = 100; // on a page
const METRICS = 3; // of a row
const CLOSED = /[%;\\]/; // the server refuses such paths, lest somebody decodes them twice

const pageOf = (row) => (row.status.startsWith("search ") ? "searches" : "run");

export function Runs({ query }) {
  const where = query.where || "";
  const sort = query.sort || "-started_t";
  const cursor = Math.max(Number(query.cursor) || 0, 0);
  const [typed, setTyped] = useState(where);
  const [{ at, chosen }, show] = useState({ at: 0, chosen: [] });
  const now = useRef({ at: 0, chosen: [], rows: [] }); // what the next key acts on, also before the page is drawn again
  const set = (fields) => { now.current = { ...now.current, ...fields }; show({ at: now.current.at, chosen: now.current.chosen }); };
  const filter = useRef(null);
  const path = `runs?${new URLSearchParams({ where, sort, cursor, limit: ROWS })}`;
  const { value, problem } = useAnswer(() => get(path), path, LIVE_MS);
  useEffect(() => {
    const timer = setTimeout(() => { if (typed !== where) change({ where: typed, cursor: "" }); }, 200);
    return () => clearTimeout(timer);
  }, [typed]);
  const rows = value ? value.rows : [];
  now.current.rows = rows;
  const toggle = (run) => { const old = now.current.chosen; set({ chosen: old.includes(run) ? old.filter((one) => one !== run) : [...old, run] }); };
  useEffect(() => {
    const pressed = (event) => {
      if (!isForPage(event)) return;
      const { at: n, chosen: selected, rows: listed } = now.current;
      const row = listed[n];
      if (event.key === "/") { event.preventDefault(); filter.current.focus(); }
      else if (event.key === "j") set({ at: Math.min(n + 1, listed.length - 1) });
      else if (event.key === "k") set({ at: Math.max(n - 1, 0) });
      else if (event.key === "x" && row) toggle(row.run);
      else if (event.key === "c" && selected.length) go("compare", "", { runs: selected.join(",") });
      else if (event.key === "Enter" && row && !event.target.closest("a, button")) go(pageOf(row), row.run);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  const order = (name) => change({ sort: sort === name ? `-${name}` : name, cursor: "" });
  const turn = (to) => { change({ cursor: to > 0 ? to : "" }); set({ at: 0 }); scrollTo(0, 0); };
  const metrics = [...new Set(rows.flatMap((row) => Object.keys(row.metrics).slice(0, METRICS)))].slice(0, 4);
  const sorter = (name, title) => html`<button class="quiet" onClick=${() => order(name)}>${title}${sort === name ? " ↑" : sort === `-${name}` ? " ↓" : ""}</button>`;
  const isGrouped = query.group === "1";
  return html`<div class="bar">
      <h1>Runs</h1>
      <input ref=${filter} type="search" class="filter" placeholder="mlp status=training accuracy>0.9 tags=best" value=${typed}
        aria-label="Filter" onInput=${(e) => setTyped(e.target.value)} />
      <label class="check"><input type="checkbox" checked=${isGrouped} onChange=${() => change({ group: isGrouped ? "" : "1" })} />by job and search</label>
      <a class="button ${chosen.length ? "" : "off"}" href=${link("compare", "", { runs: chosen.join(",") })}
        aria-disabled=${!chosen.length}>Compare ${chosen.length || ""}</a>
      <span class="total" aria-live="polite">${value ? `${value.total.toLocaleString("en")} runs` : "…"}</span>
    </div>
    <${ErrorBox} problem=${problem} />
    ${isGrouped && value ? html`<${Groups} groups=${value.groups} all=${value.all_groups} />` : html`<div class="scroll" tabindex="0"><table class="runs">
      <thead><tr><th><span class="hidden">selected</span></th>${COLUMNS.map(([name, title]) => html`<th
        aria-sort=${(name ? [name] : metrics).includes(sort.replace(/^-/, "")) ? (sort.startsWith("-") ? "descending" : "ascending") : null}>
        ${name ? sorter(name, title) : metrics.length ? html`<span class="sorters">${metrics.map((one) => sorter(one, one))}</span>` : title}</th>`)}</tr></thead>
      <tbody>${rows.map((row, n) => html`<tr key=${row.run} class=${n === at ? "at" : ""}>
        <td><input type="checkbox" aria-label=${`select ${row.run}`} checked=${chosen.includes(row.run)} onChange=${() => toggle(row.run)} /></td>
        <td data-metrics=${metricsText(row.metrics, 2)}>${CLOSED.test(row.run) ? html`${row.run} <span class="warn">cannot be opened here: rename its directory</span>` : html`<a href=${link(pageOf(row), row.run)}>${row.run}</a>`} ${row.tags.map((tag) => html`<span class="tag">${tag}</span>`)}
          ${row.damage && html`<span class="warn" title=${row.damage}>damaged rows</span>`}</td>
        <td><${Status} status=${row.status} /></td>
        <td class="n">${row.steps ? `${row.step}/${row.steps}` : row.step || "–"}</td>
        <td class="metrics">${metricsText(row.metrics, METRICS)}</td><td class="n">${when(row.started_t)}</td>
        <td><code title=${row.weights_sha256}>${row.weights_sha256.slice(0, 10)}</code></td></tr>`)}</tbody></table></div>
      ${value && !rows.length && html`<p class="empty">${where ? "No run matches." : "There are no runs yet: shoal run JOB"}</p>`}
      ${value && (cursor > 0 || value.cursor) && html`<div class="bar pager"><button onClick=${() => turn(cursor - ROWS)} disabled=${!cursor}>Previous</button>
        <span class="total">${rows.length ? `${(cursor + 1).toLocaleString("en")} to ${(cursor + rows.length).toLocaleString("en")}` : "none"}</span>
        <button onClick=${() => turn(cursor + ROWS)} disabled=${!value.cursor}>Next</button></div>`}`}`;
}

function Groups({ groups, all }) {
  return html`<div class="scroll" tabindex="0"><table><thead><tr><th>job or search</th><th>what</th><th>runs</th><th>training</th><th>newest</th></tr></thead>
    <tbody>${groups.map((one) => html`<tr key=${one.kind + one.job}><td><a href=${one.kind === "search" ? link("searches", one.job) : link("runs", "", { where: `job=${one.job}` })}>${one.job}</a></td><td>${one.kind}</td>
      <td class="n">${number(one.runs)}</td><td class="n">${number(one.training)}</td><td>${when(one.newest_t)}</td></tr>`)}</tbody></table></div>
    ${all > groups.length && html`<p class="hint">The ${groups.length} largest of ${all.toLocaleString("en")}; filter for the others.</p>`}`;
}
