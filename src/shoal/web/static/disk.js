// What runs occupy, when the disk will be full, cleaning up by rules, the trash, and undo.
import { useState } from "./vendor/hooks.js";
import { act, get, post } from "./api.js";
import { html, ErrorBox, count, seconds, size, takeLeft, useAnswer, useDialog, when } from "./show.js";
import { link } from "./route.js";

const DAY_S = 86400;
const PARTS = ["checkpoints", "model", "events", "logs", "other"];

export function Disk({ me }) {
  const { value, problem, refresh } = useAnswer(() => get("storage?limit=200"), "storage");
  const [dialog, ask] = useDialog();
  const [said, setSaid] = useState(takeLeft);
  const may = me.role !== "read";
  if (!value) return html`<${ErrorBox} problem=${problem} />`;
  const done = (text) => { setSaid(text); refresh(); };
  const shares = value.rows.some((row) => row.shared_bytes);
  const drop = (run) => ask({ title: `Delete the checkpoints of ${run}?`, danger: true, button: "Move to the trash", label: `Type ${run} to confirm`, must: run,
    text: "The model, the curves and the receipt stay. A run that has not finished cannot be resumed without checkpoints.",
    action: async (typed) => { await act(`runs/${encodeURIComponent(run)}/delete`, { confirm: typed, part: "checkpoints" }); done(`the checkpoints of ${run} are in the trash`); } });
  const restore = (entry, run) => ask({ title: `Restore ${run}?`, text: "It goes back to where it was.", button: "Restore",
    action: async () => { await act(`trash/${entry}/restore`); done(`${run} is back`); } });
  const empty = () => ask({ title: "Empty the trash?", danger: true, button: "Delete for good", label: "Type empty to confirm", must: "empty",
    text: `${value.trash.length} entries are deleted for good.`, action: async (typed) => {
      const found = await act("trash/empty", { confirm: typed });
      done(`${size(found.freed_bytes)} are free`);
    } });
  return html`<div class="bar"><h1>Disk</h1></div><${ErrorBox} problem=${problem} />
    <dl class="facts"><div><dt>free</dt><dd>${size(value.free_bytes)}</dd></div><div><dt>of</dt><dd>${size(value.total_bytes)}</dd></div>
      ${value.full_in_s !== null && value.full_in_s < 30 * DAY_S && html`<div><dt>full in</dt><dd class=${value.full_in_s < DAY_S ? "bad" : ""}>${value.full_in_s < 2 * DAY_S ? seconds(value.full_in_s) : `${Math.round(value.full_in_s / DAY_S)} days`}</dd></div>`}
      <div><dt>${count(value.runs)} runs</dt><dd>${size(value.freed_bytes)}</dd></div><div><dt>trash</dt><dd>${size(value.trash.reduce((sum, one) => sum + one.size_bytes, 0))}</dd></div></dl>
    <p class="said" role="status">${said}</p>
    ${may && html`<${Cleanup} ask=${ask} done=${done} />`}
    <h2>Runs</h2>
    <div class="scroll" tabindex="0"><table><thead><tr><th>run</th><th>deleting frees</th>${shares && html`<th title="files that have another name elsewhere">shared</th>`}<th>files</th>${PARTS.map((part) => html`<th>${part}</th>`)}<th></th></tr></thead>
      <tbody>${value.rows.map((row) => html`<tr><td><a href=${link("run", row.run)}>${row.run}</a></td><td class="n">${size(row.freed_bytes)}</td>${shares && html`<td class="n">${row.shared_bytes ? size(row.shared_bytes) : "–"}</td>`}<td class="n">${row.files}</td>
        ${PARTS.map((part) => html`<td class="n">${row.parts[part] ? size(row.parts[part]) : "–"}</td>`)}
        <td>${may && row.may_drop && html`<button onClick=${() => drop(row.run)}>Drop checkpoints</button>`}</td></tr>`)}</tbody></table></div>
    ${value.runs > value.rows.length && html`<p class="hint">The ${count(value.rows.length)} largest of ${count(value.runs)}; <code>shoal du</code> lists all.</p>`}
    <div class="bar"><h2>Trash</h2>${may && value.trash.length > 0 && html`<button class="danger" onClick=${empty}>Empty</button>`}</div>
    ${value.trash.length ? html`<div class="scroll" tabindex="0"><table><thead><tr><th>run</th><th>part</th><th>deleted</th><th>frees</th><th></th></tr></thead><tbody>
      ${value.trash.map((one) => html`<tr><td>${one.run}</td><td>${one.part || "all"}</td><td>${when(one.t)}</td><td class="n">${size(one.size_bytes)}</td>
        <td>${may && html`<button onClick=${() => restore(one.entry, one.run)}>Restore</button>`}</td></tr>`)}</tbody></table></div>` : html`<p class="empty">The trash is empty.</p>`}${dialog}`;
}

// A plan by rules: it shows what would go, and exactly that is applied.
function Cleanup({ ask, done }) {
  const [rules, setRules] = useState({ days: "30", keep: "newest=2", total: "", status: "", part: "" });
  const [plan, setPlan] = useState(null);
  const [problem, setProblem] = useState(null);
  const set = (name) => (event) => { setPlan(null); setRules({ ...rules, [name]: event.target.value }); };
  const make = async (event) => {
    event.preventDefault();
    const { part, ...rest } = rules;
    const body = { ...rest, days: Number(rules.days) || 0, checkpoints: part === "checkpoints", compact: part === "compact" };
    try { setPlan({ ...await post("storage/plan", body), part }); setProblem(null); } catch (one) { setPlan(null); setProblem(one); }
  };
  const packs = plan && plan.part === "compact";
  const apply = () => ask({ title: "Clean up?", danger: !packs, button: packs ? "Compact" : "Move to the trash",
    text: packs ? `Events and logs of ${plan.items.length} runs are packed, which frees about ${size(plan.freed_bytes)}. Nothing is lost.`
      : `${plan.items.length} of the list move to the trash, ${size(plan.freed_bytes)}. They can be restored until it is emptied.`,
    action: async () => {
      const found = await act("storage/apply", { plan: plan.plan });
      setPlan(null);
      done([packs ? `${found.compacted.length} are compacted, ${size(found.freed_bytes)} are free` : `${found.moved.length} are in the trash`, ...found.stays].join("; "));
    } });
  const field = (name, label, hint, type = "text") => html`<label>${label} <input type=${type} min="0" value=${rules[name]} placeholder=${hint} onInput=${set(name)} /></label>`;
  return html`<details class="cleanup"><summary>Clean up</summary>
    <form class="rules" onSubmit=${make}>${field("days", "unchanged for days", "", "number")}${field("keep", "keep of each job", "newest=2,best=1")}
      ${field("total", "until all are below", "200 GB")}${field("status", "only", "failed,stopped")}
      <label>what goes <select value=${rules.part} onChange=${set("part")}><option value="">whole runs</option><option value="checkpoints">checkpoints of finished runs</option><option value="compact">nothing: compact finished runs</option></select></label><button>Show what would go</button></form>
    <${ErrorBox} problem=${problem} />
    ${plan && !plan.items.length && html`<p class="empty">Nothing would go. Runs with tags, and runs that are driven, always stay.</p>`}
    ${plan && plan.items.length > 0 && html`<div class="scroll tall"><table><thead><tr><th>run</th><th>part</th><th>frees</th></tr></thead>
      <tbody>${plan.items.map((one) => html`<tr><td>${one.run}</td><td>${one.part || "all"}</td><td class="n">${size(one.freed_bytes)}</td></tr>`)}</tbody></table></div>
      <p><button class=${packs ? "" : "danger"} onClick=${apply}>${packs ? `Compact ${plan.items.length}, about` : `Move ${plan.items.length} to the trash,`} ${size(plan.freed_bytes)}</button> <span class="hint">plan <code>${plan.plan}</code></span></p>`}</details>`;
}
