// Compressions: their list, and the ladder of one: every rung, kept or not, and why.
import { get, runPath } from "./api.js";
import { html, ErrorBox, Status, count, number, size, useAnswer, when } from "./show.js";
import { link } from "./route.js";

const LIVE_MS = 5000;
const percent = (share) => (typeof share === "number" ? `${(100 * share).toFixed(1)} %` : "–");

export function Compressions({ name }) {
  return name ? html`<div class="bar"><h1>${name}</h1><span class="actions"><a class="button" href=${link("run", name)}>Run</a></span></div><${Ladder} name=${name} />` : html`<${List} />`;
}

function List() {
  const { value, problem } = useAnswer(() => get("compressions"), "compressions", LIVE_MS);
  return html`<div class="bar"><h1>Compressions</h1></div><${ErrorBox} problem=${problem} />
    ${value && !value.rows.length && html`<p class="empty">There are no compressions yet: shoal compress RUN</p>`}
    ${value && value.rows.length > 0 && html`<div class="scroll" tabindex="0"><table><thead><tr><th>compression</th><th>status</th><th>parent</th><th>result</th><th>size</th><th>targets</th><th>started</th></tr></thead>
      <tbody>${value.rows.map((row) => html`<tr key=${row.run}><td><a href=${link("compressions", row.run)}>${row.run}</a></td><td><${Status} status=${row.status} /></td>
        <td>${row.parent && html`<a href=${link("run", row.parent)}>${row.parent}</a>`}</td><td>${row.chosen}</td><td class="n">${percent(row.size_ratio)}</td>
        <td>${row.targets_met === null ? "–" : row.targets_met ? "met" : html`<span class="warn">not met</span>`}</td><td class="n">${when(row.started_t)}</td></tr>`)}</tbody></table></div>`}`;
}

const latency = (ratios) => (ratios ? `${ratios[1].toFixed(2)} (${ratios[0].toFixed(2)}–${ratios[2].toFixed(2)})` : "–");

export function Ladder({ name }) {
  const { value, problem } = useAnswer(() => get(`${runPath(name)}/compression`), name, LIVE_MS);
  if (!value) return html`<${ErrorBox} problem=${problem} />`;
  if (!value.parent) return html`<p class="empty">There is no report: the compression still runs or failed, or this is not one.</p>`;
  const batches = [...new Set(value.rungs.flatMap((one) => Object.keys(one.latency)))];
  return html`<${ErrorBox} problem=${problem} /><p class="proof ${value.targets_met ? "good" : ""}">The result is <b>${value.chosen}</b>. ${value.targets_met ? "It meets the targets." : "It does not meet the targets."} Parent: <a href=${link("run", value.parent)}>${value.parent}</a>, weights <code>${value.parent_sha256.slice(0, 12)}</code></p>
    <div class="scroll" tabindex="0"><table><thead><tr><th>rung</th><th>size</th><th>of parent</th><th>parameters</th>${batches.map((one) => html`<th>latency, batch ${one}</th>`)}<th>quality</th><th>drop (95 %)</th><th></th></tr></thead>
      <tbody>${value.rungs.map((one) => html`<tr key=${one.name} class=${one.chosen ? "at" : ""}><td><b>${one.name}</b>${one.kept ? " (kept)" : ""}</td><td class="n">${one.size_bytes === null ? "–" : size(one.size_bytes)}</td>
        <td class="n">${one.size_ratio === null ? "–" : html`<meter max="1" value=${Math.min(one.size_ratio, 1)} aria-label=${`size of ${one.name}`}></meter> ${percent(one.size_ratio)}`}</td><td class="n">${one.parameters ? count(one.parameters) : "–"}</td>
        ${batches.map((batch) => html`<td class="n">${latency(one.latency[batch])}</td>`)}<td class="n">${one.metric ? `${one.metric} ${number(one.value)}` : "–"}</td>
        <td class="n">${typeof one.drop === "number" ? `${percent(one.drop)} ≤ ${percent(one.drop_bound)}` : "–"}</td><td>${one.why}</td></tr>`)}</tbody></table></div>
    <p class="hint">Latency is CPU time per call with one thread, as a ratio to the parent in the same runtime: median and quartiles.</p>
    ${value.test && html`<p>Test part, looked at once: ${value.test.metric} ${number(value.test.value)}, the parent ${number(value.test.parent)}; drop ${percent(value.test.drop)}, at most ${percent(value.test.drop_bound)}.</p>`}
    ${value.notes.map((note) => html`<p class="warn">${note}</p>`)}`;
}
