// Searches: their list; one search with its trials, best so far, Pareto front and importance.
import { get } from "./api.js";
import { html, ErrorBox, Status, metricsText, number, useAnswer, when } from "./show.js";
import { change, link } from "./route.js";
import { Chart } from "./chart.js";
import { Scatter } from "./scatter.js";
import { Parallel } from "./parallel.js";

const LIVE_MS = 3000;

export function Searches({ name, query }) {
  return name ? html`<${Search} name=${name} query=${query} />` : html`<${List} />`;
}

function List() {
  const { value, problem } = useAnswer(() => get("searches"), "searches", LIVE_MS);
  return html`<div class="bar"><h1>Searches</h1></div><${ErrorBox} problem=${problem} />
    ${value && !value.rows.length && html`<p class="empty">There are no searches yet: shoal search JOB</p>`}
    ${value && value.rows.length > 0 && html`<div class="scroll" tabindex="0"><table><thead><tr><th>search</th><th>status</th><th>stretches</th><th>best</th><th>started</th></tr></thead>
      <tbody>${value.rows.map((row) => html`<tr key=${row.run}><td><a href=${link("searches", row.run)}>${row.run}</a></td><td><${Status} status=${row.status} /></td>
        <td class="n">${row.told}/${row.decided}</td><td class="metrics">${metricsText(row.metrics)}</td><td class="n">${when(row.started_t)}</td></tr>`)}</tbody></table></div>`}`;
}

const short = (path) => path.split(".").at(-1);
const shown = (value) => (value !== null && typeof value === "object" ? JSON.stringify(value) : number(value));

// The best value so far as a line of steps, up to what is spent.
function bestLine(search) {
  const step = [], last = [];
  for (const one of search.history) {
    if (typeof one.value !== "number") continue;
    if (last.length) { step.push(one.trainings); last.push(last.at(-1)); }
    step.push(one.trainings); last.push(one.value);
  }
  if (last.length && search.spent > step.at(-1)) { step.push(search.spent); last.push(last.at(-1)); }
  return { label: search.goals[0].metric, step, t: step, t0: 0, last, least: [], most: [], marks: [] };
}

function asComparison(search) {
  const keys = [...new Set(search.trials.flatMap((one) => Object.keys(one.changes)))];
  const names = [...keys, ...search.goals.map((one) => one.metric)];
  const cell = (one, name) => (keys.includes(name) ? one.changes[name] : one.values[name]) ?? null;
  return { runs: search.trials.map((one) => `trial ${one.trial}`), differs: names,
    fields: Object.fromEntries(names.map((name) => [name, search.trials.map((one) => cell(one, name))])) };
}

function Search({ name, query }) {
  const limit = Number(query.limit) || 200;
  const path = `searches/${encodeURIComponent(name)}?limit=${limit}`;
  const { value: search, problem } = useAnswer(() => get(path), path, LIVE_MS);
  if (!search) return html`<${ErrorBox} problem=${problem} />`;
  const line = bestLine(search);
  const best = search.trials.find((one) => one.trial === search.best);
  const importance = Object.entries(search.importance).sort((a, b) => b[1] - a[1]);
  return html`<div class="bar"><h1>${name}</h1><${Status} status=${search.status} />
      <span class="actions"><a class="button" href=${link("run", name, { tab: "job" })}>Job</a></span></div>
    <${ErrorBox} problem=${problem} />
    <dl class="facts"><div><dt>trials</dt><dd>${search.total}</dd></div><div><dt>trainings</dt><dd>${number(search.spent)}</dd></div>
      ${Object.entries(search.counts).map(([state, n]) => html`<div><dt>${state}</dt><dd>${n}</dd></div>`)}
      ${best && html`<div><dt>best: trial ${best.trial}</dt><dd>${metricsText(best.values)}</dd></div>`}
      ${search.starts > 1 && html`<div><dt>starts</dt><dd>${search.starts}</dd></div>`}</dl>
    ${search.note && html`<p class="warn">${search.note}</p>`}
    <div class="charts">${line.last.length > 0 && html`<${Chart} title=${`best ${line.label}, over trainings`} lines=${[line]} />`}
      ${search.goals.length > 1 && html`<${Scatter} goals=${search.goals} trials=${search.trials} />`}
      ${importance.length > 0 && html`<figure class="chart"><figcaption><b>Which values matter</b></figcaption><table class="pairs"><tbody>
        ${importance.map(([key, share]) => html`<tr><th scope="row">${key}</th><td><meter max="1" value=${share} aria-label=${key}></meter> ${Math.round(100 * share)} %</td></tr>`)}</tbody></table></figure>`}</div>
    ${search.trials.length > 1 && html`<${Parallel} value=${asComparison(search)} />`}
    <h2>Trials</h2><${Trials} search=${search} />
    ${search.total > search.trials.length && html`<button onClick=${() => change({ limit: Math.min(limit * 4, 5000) })}>More: ${search.trials.length} of ${search.total} are shown</button>`}
    ${search.receipt && html`<h2>Receipt</h2><p class="proof ${search.receipt.exact === true ? "good" : ""}"><b>exact: ${search.receipt.exact === true ? "yes" : search.receipt.exact === false ? "no" : "not checked"}</b> ${search.receipt.why}<br />
      SHA-256 of all decisions and values <code>${search.receipt.decisions_sha256}</code><br />SHA-256 of the winner's weights <code>${search.receipt.weights_sha256}</code></p>`}`;
}

function Trials({ search }) {
  const keys = [...new Set(search.trials.flatMap((one) => Object.keys(one.changes)))];
  return html`<div class="scroll" tabindex="0"><table class="trials"><thead><tr><th>trial</th><th>state</th><th>done</th>
      ${search.goals.map((one) => html`<th>${one.metric} ${one.sign > 0 ? "↑" : "↓"}</th>`)}${keys.map((key) => html`<th title=${key}>${short(key)}</th>`)}<th></th></tr></thead>
    <tbody>${search.trials.map((one) => html`<tr key=${one.trial} class=${one.trial === search.best ? "at" : ""}>
      <td class="n">${one.run ? html`<a href=${link("run", one.run)}>${one.trial}</a>` : one.trial}${one.trial === search.best ? " (best)" : one.on_front ? " (front)" : ""}</td>
      <td><${Status} status=${one.state} /></td><td class="n">${one.unit}/${one.units}</td>
      ${search.goals.map((goal) => html`<td class="n">${number(one.values[goal.metric])}</td>`)}${keys.map((key) => html`<td>${key in one.changes ? shown(one.changes[key]) : "–"}</td>`)}
      <td>${one.failure ? html`<span class="warn">${one.failure}</span>` : one.why}${one.copy_of && html` copy of trial ${one.copy_of[0]}`}</td></tr>`)}</tbody></table></div>`;
}
