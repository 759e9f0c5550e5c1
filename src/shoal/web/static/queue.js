// The queue: what runs, what waits and why; submit, cancel, release, priority.
import { useState } from "./vendor/hooks.js";
import { act, get } from "./api.js";
import { html, ErrorBox, Status, told, useAnswer, useDialog, when } from "./show.js";
import { change, link } from "./route.js";

const LIVE_MS = 2000;
const LIVE = ["waiting", "running", "held"];

export function Queue({ name, query, me }) {
  const limit = Number(query.limit) || 200;
  const { value, problem, refresh } = useAnswer(() => get(`queue?limit=${limit}`), `queue ${limit}`, LIVE_MS);
  const [dialog, ask] = useDialog();
  const [said, setSaid] = useState("");
  const may = (role) => ["read", "operate", "submit"].indexOf(me.role) >= ["read", "operate", "submit"].indexOf(role);
  const done = (text) => { setSaid(text); refresh(); };
  const cancel = (one) => ask({ title: `Cancel job ${one.id}?`, text: one.state === "running" ? "Its run is saved and stopped." : "It does not start.", button: "Cancel the job", danger: true,
    action: async () => { const result = await act(`queue/${one.id}/cancel`); done(`job ${one.id} is ${result.state === "cancelled" ? "cancelled" : "being stopped"}`); } });
  const release = (one) => ask({ title: `Release job ${one.id}?`, text: "It goes on from where it was. This runs the job's code.", button: "Release",
    action: async () => { const result = await act(`queue/${one.id}/release`); done(`job ${one.id} is ${result.state}`); } });
  const reorder = (one) => ask({ title: `Priority of job ${one.id}`, text: "Higher goes first, from -100 to 100.", label: "Priority", value: String(one.priority), button: "Change",
    action: async (typed) => { const result = await act(`queue/${one.id}/priority`, { priority: Number(typed) }); done(`job ${one.id} has priority ${result.priority}`); } });
  if (name) return html`<${Entry} number=${name} />`;
  return html`<div class="bar"><h1>Queue</h1>${may("submit") && html`<${Submit} done=${done} preset=${query.submit || ""} />`}
      <span class="total">${value ? `${value.total} jobs; ${value.served ? "a daemon serves them" : "no daemon lives"}` : "…"}</span></div>
    <${ErrorBox} problem=${problem} /><p class="said" role="status">${said}</p>
    ${value && html`<dl class="facts">${Object.entries(value.counts).map(([state, n]) => html`<div><dt>${state}</dt><dd>${n}</dd></div>`)}
      ${Object.entries(value.quotas).map(([user, cores]) => html`<div><dt>quota of ${user}</dt><dd>${cores} cores</dd></div>`)}</dl>`}
    ${value && !value.rows.length && html`<p class="empty">The queue is empty: shoal submit JOB</p>`}
    ${value && value.rows.length > 0 && html`<div class="scroll" tabindex="0"><table><thead><tr><th>id</th><th>job</th><th>user</th><th>priority</th><th>state</th><th>workers</th><th>run</th><th>why</th><th></th></tr></thead>
      <tbody>${value.rows.map((one) => html`<tr key=${one.id}><td class="n"><a href=${link("queue", String(one.id))}>${one.id}</a></td><td>${one.name}</td><td>${one.user}</td><td class="n">${one.priority}</td>
        <td><${Status} status=${one.state} /></td><td class="n">${one.state === "running" ? `${one.workers} of ` : ""}${one.least === one.most ? one.most : `${one.least}..${one.most}`}</td>
        <td>${one.run && html`<a href=${link("run", one.run)}>${one.run}</a>`}</td><td>${told(one.why)}</td>
        <td class="acts">${may("operate") && LIVE.includes(one.state) && html`<button onClick=${() => reorder(one)}>Priority</button> <button class="danger" onClick=${() => cancel(one)}>Cancel</button>`}
          ${may("submit") && ["held", "failed"].includes(one.state) && html` <button onClick=${() => release(one)}>Release</button>`}</td></tr>`)}</tbody></table></div>`}
    ${value && value.total > value.rows.length && html`<button onClick=${() => change({ limit: Math.min(limit * 4, 5000) })}>More: ${value.rows.length} of ${value.total} are shown</button>`}${dialog}`;
}

// Submit the job of a run again, with changed fields.
function Submit({ done, preset }) {
  const [run, setRun] = useState(preset);
  const [sets, setSets] = useState("");
  const [priority, setPriority] = useState("0");
  const [problem, setProblem] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    setProblem(null);
    try {
      const result = await act("queue", { run: run.trim(), set: sets.split(/\s+/).filter(Boolean), priority: Number(priority) });
      done(`job ${result.id} is ${result.state}`);
      setRun("");
    } catch (one) { setProblem(one); }
  };
  return html`<form class="grow submit" onSubmit=${submit}><input aria-label="Run whose job is submitted again" placeholder="submit this run again" value=${run} onInput=${(e) => setRun(e.target.value)} />
    <input class="filter" aria-label="Changed fields" placeholder="optimizer.args.lr=0.01 seed=2" value=${sets} onInput=${(e) => setSets(e.target.value)} />
    <label class="check">priority <input type="number" min="-100" max="100" value=${priority} onInput=${(e) => setPriority(e.target.value)} /></label>
    <button class="primary" disabled=${!run.trim()}>Submit</button><${ErrorBox} problem=${problem} /></form>`;
}

function Entry({ number }) {
  const { value, problem } = useAnswer(() => get(`queue/${encodeURIComponent(number)}`), number, LIVE_MS);
  return html`<div class="bar"><h1>Job ${number} of the queue</h1>${value && html`<${Status} status=${value.entry.state} />`}<span class="actions"><a class="button" href=${link("queue")}>Queue</a></span></div>
    <${ErrorBox} problem=${problem} />
    ${value && html`<p>${value.entry.name}, of ${value.entry.user}, ${value.entry.attempts} ${value.entry.attempts === 1 ? "attempt" : "attempts"}${value.entry.run && html`, run <a href=${link("run", value.entry.run)}>${value.entry.run}</a>`}</p>
      ${value.entry.why && html`<p class="proof">${told(value.entry.why)}</p>`}
      <div class="scroll" tabindex="0"><table><thead><tr><th>when</th><th>state</th><th>workers</th><th>why</th></tr></thead>
        <tbody>${value.history.map((row) => html`<tr><td class="n">${when(row.t)}</td><td><${Status} status=${row.state} /></td><td class="n">${row.workers || ""}</td><td>${told(row.reason)}</td></tr>`)}</tbody></table></div>`}`;
}
