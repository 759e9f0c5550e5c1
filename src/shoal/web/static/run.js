// One run: curves, workers, timeline, receipt, logs, job; and what can be done to it.
import { useEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import { act, follow, get, isFile, runPath } from "./api.js";
import { html, ErrorBox, Status, count, leave, number, seconds, size, useAnswer, useDialog } from "./show.js";
import { change, go, isForPage, link } from "./route.js";
import { Chart, toLine } from "./chart.js";
import { append, liveWorkers } from "./live.js";
import { Timeline } from "./timeline.js";
import { Logs } from "./logs.js";

const TABS = [["curves", "Curves"], ["workers", "Workers"], ["timeline", "Timeline"], ["receipt", "Receipt"], ["logs", "Logs"], ["job", "Job"]];
const REFETCH_POINTS = 400; // points appended by events before the curves are asked for again
const STATE_MS = 2000; // from a step to the next look at the state of the run
const STEP_S = "step s/"; // series of planned runs
const LIVE = ["training", "starting"];

// A trial is steered by its search alone.
const maySteer = (run, me, name) => LIVE.includes(run.status) && me.role !== "read" && !name.includes("~trial-");

export function Run({ name, query, me }) {
  const tab = query.tab || "curves";
  const { value: run, problem, refresh } = useAnswer(() => get(runPath(name)), name);
  const fresh = useRef({ rows: [], again: false }); // what the curves have not taken yet
  const [news, setNews] = useState(0);
  const offset = run ? run.offset : null;
  const soon = useRef(null);
  useEffect(() => {
    if (offset === null) return undefined;
    return follow(name, offset, ({ rows }) => {
      const waiting = [...fresh.current.rows, ...rows];
      fresh.current = waiting.length > REFETCH_POINTS ? { rows: [], again: true } : { ...fresh.current, rows: waiting };
      setNews((old) => old + 1);
      const isUrgent = rows.some((row) => row.kind !== "step");
      if (soon.current && !isUrgent) return;
      clearTimeout(soon.current);
      soon.current = setTimeout(() => { soon.current = null; refresh(); }, isUrgent ? 300 : STATE_MS);
    }, refresh, async () => {
      const page = await get(runPath(name));
      fresh.current = { rows: [], again: true };
      setNews((old) => old + 1);
      refresh();
      return page.offset;
    });
  }, [name, offset !== null]);
  useEffect(() => {
    const pressed = (event) => {
      if (!isForPage(event)) return;
      const chosen = TABS[Number(event.key) - 1];
      if (chosen) change({ tab: chosen[0] });
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  if (!run) return html`<${ErrorBox} problem=${problem} />`;
  return html`<${Head} run=${run} me=${me} refresh=${refresh} name=${name} />
    <${ErrorBox} problem=${problem} />
    ${run.error && html`<div class="error"><b>${run.error.code} ${run.error.message}</b><div>${run.error.where} ${run.error.fix}</div></div>`}
    ${run.folds.length > 0 && html`<p>Folds: ${run.folds.map((one) => (isFile ? `${one.split("~").at(-1)} ` : html`<a class="fold" href=${link("run", one)}>${one.split("~").at(-1)}</a> `))}</p>`}
    <div class="tabs" role="tablist" aria-label="Parts of the run" onKeyDown=${(event) => walk(event, tab)}>${TABS.map(([id, title]) => html`<button role="tab" id=${`tab-${id}`}
      tabindex=${tab === id ? 0 : -1} aria-selected=${tab === id} aria-controls="part" class=${tab === id ? "on" : ""} onClick=${() => change({ tab: id })}>${title}</button>`)}</div>
    <section id="part" role="tabpanel" aria-labelledby=${`tab-${tab}`}>
      ${tab === "curves" && html`<${Curves} name=${name} run=${run} fresh=${fresh} news=${news} query=${query} />`}
      ${tab === "workers" && html`<${Workers} run=${run} me=${me} name=${name} refresh=${refresh} />`}
      ${tab === "timeline" && html`<${Timeline} name=${name} run=${run} query=${query} />`}
      ${tab === "receipt" && html`<${Receipt} name=${name} status=${run.status} />`}
      ${tab === "logs" && html`<${Logs} name=${name} live=${LIVE.includes(run.status)} query=${query} />`}
      ${tab === "job" && html`<${Job} name=${name} query=${query} />`}
    </section>`;
}

// Arrow keys go from tab to tab, as everywhere.
function walk(event, tab) {
  const to = { ArrowRight: 1, ArrowLeft: -1, Home: -TABS.length, End: TABS.length }[event.key];
  if (!to) return;
  event.preventDefault();
  const at = TABS.findIndex(([id]) => id === tab) + to;
  const next = TABS[Math.abs(to) > 1 ? Math.min(Math.max(at, 0), TABS.length - 1) : (at + TABS.length) % TABS.length][0];
  change({ tab: next });
  document.getElementById(`tab-${next}`).focus();
}

function Head({ run, me, refresh, name }) {
  const [dialog, ask] = useDialog();
  const [said, setSaid] = useState("");
  const path = runPath(name);
  const done = (text) => { setSaid(text); refresh(); };
  const may = (role) => ["read", "operate", "submit"].indexOf(me.role) >= ["read", "operate", "submit"].indexOf(role);
  const live = LIVE.includes(run.status);
  const trial = name.includes("~trial-"); // its search steers it
  const search = run.status.startsWith("search ");
  const share = run.steps ? run.step / run.steps : 0;
  const stop = () => ask({ title: `Stop ${name}?`, text: "It saves first; Resume continues it with the same weights.", button: "Save and stop",
    action: async () => { const result = await act(`${path}/stop`); done(`${result.status}; ${result.saved_step === null ? "nothing was saved yet" : `saved at step ${result.saved_step}`}`); } });
  const resume = () => ask({ title: `Resume ${name}?`, text: "A new process drives it from its last checkpoint. It runs the job's code.", button: "Resume",
    action: async () => { const result = await act(`${path}/resume`); done(`process ${result.pid} drives it`); } });
  const scale = () => ask({ title: "How many workers?", text: "The weights stay the same, bit for bit, if the job is exact.", label: "Workers", button: "Scale",
    value: String(run.workers.filter((one) => one.state === "training").length || 1),
    action: async (typed) => { const result = await act(`${path}/scale`, { workers: Number(typed) || 0 }); done([`${result.wanted} workers are wanted`, ...result.notes].join("; ")); } });
  const tag = () => ask({ title: "Tags", text: "Words with spaces between. Runs with tags are never cleaned up.", label: "Tags", value: run.tags.join(" "), button: "Save",
    action: async (typed) => {
      const wanted = typed.split(/\s+/).filter(Boolean);
      await act(`${path}/tags`, { add: wanted, remove: run.tags.filter((one) => !wanted.includes(one)) });
      done("tags are changed");
    } });
  const compact = () => ask({ title: run.packed ? `Expand ${name}?` : `Compact ${name}?`, button: run.packed ? "Expand" : "Compact",
    text: run.packed ? "Events and logs are unpacked: the files are as they were." : "Events and logs are packed. Nothing is lost, and everything reads them as before. Model, checkpoints and receipt stay as they are.",
    action: async () => { const found = await act(`${path}/compact`, { undo: run.packed }); done(`${size(found.before_bytes)} before, ${size(found.after_bytes)} now`); } });
  const remove = () => ask({ title: `Delete ${name}?`, danger: true, button: "Move to the trash", label: `Type ${run.name} to confirm`, must: run.name,
    text: "The run moves to the trash, from where it can be restored (page Disk). Emptying the trash deletes it for good.",
    option: { text: "For good, without the trash", button: "Delete for good", warning: "The run is deleted at once and cannot be restored. This also works where the disk is full." },
    action: async (typed, ticked) => {
      const found = await act(`${path}/delete`, { confirm: typed, for_good: ticked });
      leave(ticked ? `${name} is deleted for good, ${size(found.freed_bytes)} are free` : `${name} is in the trash`);
      go("disk");
    } });
  return html`<div class="bar"><h1>${trial ? html`<a href=${link("searches", name.split("~")[0])}>${name.split("~")[0]}</a>/${name.split("~").slice(1).join("/")}` : name.replaceAll("~", "/")}</h1><${Status} status=${run.status} />
      ${run.tags.map((one) => html`<span class="tag">${one}</span>`)}
      <span class="actions">
        ${live && may("operate") && !trial && html`<button onClick=${scale}>Scale</button><button onClick=${stop}>Stop</button>`}
        ${!live && run.status !== "finished" && may("submit") && !trial && !search && html`<button onClick=${resume}>Resume</button>`}
        ${search && html`<a class="button" href=${link("searches", name)}>Search</a>`}
        ${may("operate") && !name.includes("~") && html`<button onClick=${tag}>Tag</button>
          ${run.status === "finished" && html`<button onClick=${compact}>${run.packed ? "Expand" : "Compact"}</button>`}
          ${!live && html`<button class="danger" onClick=${remove}>Delete</button>`}`}
        ${run.weights_sha256 && !run.folds.length && may("operate") && html`<a class="button" href=${`/api/v1/${path}/model`} download=${`${run.name}.safetensors`}>Model</a>`}
        ${may("submit") && me.runs === null && !name.includes("~") && html`<a class="button" href=${link("queue", "", { submit: name })}>Submit again</a>`}
        ${!isFile && name.includes("-compressed-") && html`<a class="button" href=${link("compressions", name)}>Ladder</a>`}
        ${!isFile && html`<a class="button" href=${link("compare", "", { runs: name })}>Compare</a>`}</span></div>
    ${run.steps > 0 && html`<progress max="1" value=${share} aria-label="Progress">${share}</progress>`}
    <dl class="facts">
      <div><dt>step</dt><dd>${count(run.step)}${run.steps ? ` / ${count(run.steps)}` : ""}</dd></div>
      <div><dt>training loss</dt><dd>${number(run.loss)}</dd></div>
      ${Object.entries(run.metrics).slice(0, 4).map(([key, value]) => html`<div><dt>${run.folds.length || key.includes("/") ? key : `validation ${key}`}</dt><dd>${number(value)}</dd></div>`)}
      ${live && html`<div><dt>samples/s</dt><dd>${count(Number(run.samples_per_s) || 0)}</dd></div><div><dt>left</dt><dd>${seconds(run.eta_s)}</dd></div>`}
      <div><dt>workers</dt><dd>${run.workers.filter((one) => one.state === "training").length || run.peak_workers}</dd></div>
      <div><dt>deaths</dt><dd>${run.deaths}</dd></div>
    </dl>
    <p class="said" role="status">${said}</p>${run.damage && html`<p class="warn">${run.damage}</p>`}${dialog}`;
}

// What the plan expected of a step, as stairs that reach to the last step, and what steps took.
function planLines(pages, byTime) {
  const [expected, measured] = ["expected", "measured"].map((kind) => pages.find((page) => page.name === STEP_S + kind));
  if (!expected?.step.length || !measured?.step.length) return [];
  const stairs = { step: [], t: [], last: [], least: [], most: [], not_finite: [] };
  expected.step.forEach((step, n) => {
    const isLast = n + 1 === expected.step.length;
    const end = isLast ? Math.max(measured.step.at(-1), step + 1) : Math.max(expected.step[n + 1] - 1, step);
    const endT = isLast ? measured.t.at(-1) : expected.t[n + 1];
    for (const [x, t] of end > step ? [[step, expected.t[n]], [end, endT]] : [[step, expected.t[n]]]) { stairs.step.push(x); stairs.t.push(t); stairs.last.push(expected.last[n]); }
  });
  return [toLine("expected", stairs, byTime), toLine("measured", measured, byTime)];
}

function Curves({ name, run, fresh, news, query }) {
  const [pages, setPages] = useState(null);
  const [problem, setProblem] = useState(null);
  const [range, setRange] = useState(query.from ? [Number(query.from), Number(query.to)] : null);
  const byTime = query.x === "time";
  const log = query.log === "1";
  const now = useRef({ pages: null, asked: 0, added: 0, live: null }); // also between two drawings
  now.current.run = run;
  const show = (found) => { now.current.pages = found; setPages(found); };
  const load = async () => {
    const asked = now.current.asked += 1;
    now.current.pages = null; // rows that come meanwhile wait
    fresh.current = { rows: [], again: false };
    const zoom = range ? `&from=${Math.max(Math.floor(range[0]), 0)}&to=${Math.ceil(range[1])}` : "";
    try {
      const found = await get(`${runPath(name)}/series?points=500${zoom}`);
      if (asked !== now.current.asked) return;
      Object.assign(now.current, { added: 0, live: null });
      show(found.series);
      setProblem(null);
      extend();
    } catch (one) { setProblem(one); }
  };
  const extend = () => {
    const { rows, again } = fresh.current;
    if (again) { load(); return; }
    const shown = now.current.pages;
    if (!shown || range || !rows.length) return;
    fresh.current = { rows: [], again: false };
    const copies = shown.map((page) => ({ ...page }));
    now.current.live ??= liveWorkers(now.current.run.workers);
    const { added, unknown } = append(copies, rows, now.current.live);
    now.current.added += added;
    if (now.current.added > REFETCH_POINTS || unknown || rows.some((row) => row.kind === "resumed")) load();
    else show(copies);
  };
  useEffect(() => { load(); }, [name, range]);
  useEffect(extend, [news]);
  const zoom = (from, to) => { if (!byTime) { setRange([from, to]); change({ from: Math.floor(from), to: Math.ceil(to) }); } };
  const typed = (event) => { // by keyboard, and on a phone
    event.preventDefault();
    const [from, to] = ["from", "to"].map((one) => Number(event.target.elements[one].value));
    if (to > from) { setRange([from, to]); change({ from, to }); }
  };
  const reset = () => { setRange(null); change({ from: "", to: "" }); };
  const lines = useMemo(() => (pages || []).filter((page) => !page.name.startsWith(STEP_S)).map((page) => [page, [toLine(page.name, page, byTime)]]), [pages, byTime]);
  const truth = useMemo(() => planLines(pages || [], byTime), [pages, byTime]);
  return html`<${ErrorBox} problem=${problem} /><div class="bar">
      <label class="check"><input type="checkbox" checked=${byTime} onChange=${() => change({ x: byTime ? "" : "time" })} />over time</label>
      <label class="check"><input type="checkbox" checked=${log} onChange=${() => change({ log: log ? "" : "1" })} />logarithmic</label>
      ${range ? html`<button onClick=${reset}>Steps ${Math.floor(range[0])} to ${Math.ceil(range[1])}: show all</button>`
        : html`<form class="check" onSubmit=${typed}>steps <input type="number" name="from" min="0" aria-label="From step" required /> to <input type="number" name="to" min="1" aria-label="To step" required /> <button>Zoom</button></form>`}
      <span class="hint">Or drag in a chart. Bands reach from the least to the greatest value: no peak is left out.</span></div>
    <div class="charts">${lines.map(([page, one]) => html`<${Chart} key=${page.name} title=${page.name} lines=${one} byTime=${byTime}
      log=${log && page.last.every((v) => v === null || v > 0)} onZoom=${zoom} onReset=${reset} />`)}
      ${truth.length > 0 && html`<${Chart} key="plan" title="seconds per step: the plan and the truth" lines=${truth} byTime=${byTime} log=${log} onZoom=${zoom} onReset=${reset} />`}</div>
    ${!pages && !problem && html`<p class="empty" aria-busy="true">Reading the events…</p>`}
    ${pages && !pages.length && html`<p class="empty">No step is made yet.</p>`}
    ${run.notes.length > 0 && html`<h2>What happened</h2><ol class="notes" tabindex="0" reversed>${[...run.notes].reverse().map((line) => html`<li>${line}</li>`)}</ol>`}
    ${run.plan.length > 0 && html`<h2>Plan and truth</h2><pre>${run.plan.join("\n")}</pre>`}`;
}

function Workers({ run, me, name, refresh }) {
  const [dialog, ask] = useDialog();
  const live = maySteer(run, me, name);
  const runs = LIVE.includes(run.status);
  const drain = (who) => ask({ title: `Let ${who} leave?`, button: "Drain",
    text: who.startsWith("server") ? "The others take over its parts first; nothing is lost, and it is not replaced." : "Its lanes move to the others first; nothing is lost, and it is not replaced.",
    action: async () => { await act(`${runPath(name)}/drain`, { who }); refresh(); } });
  const scaleServers = () => ask({ title: "How many servers?", text: "Parts of the weights move to new servers while the run trains.", label: "Servers", button: "Scale servers",
    value: String(run.servers.filter((one) => one.state === "serving").length || 1),
    action: async (typed) => { await act(`${runPath(name)}/scale`, { servers: Number(typed) || 0 }); refresh(); } });
  const [stacks, setStacks] = useState(null);
  const look = async () => {
    setStacks({ busy: true, processes: [] });
    try { setStacks(await act(`${runPath(name)}/stacks`)); } catch (problem) { setStacks({ problem, processes: [] }); }
  };
  const lanes = run.workers.flatMap((one) => one.lanes.map((lane) => [lane, one.name])).sort((a, b) => a[0] - b[0]);
  const place = new Map(run.workers.map((one, n) => [one.name, n]));
  return html`${lanes.length > 0 && html`<div class="lanes" role="img" aria-label=${`Lanes: ${lanes.map(([lane, who]) => `${lane} by ${who}`).join(", ")}`}>
      ${lanes.map(([lane, who]) => html`<span class="lane c${place.get(who) % 10}" title=${who}>${lane}</span>`)}</div>`}
    <div class="scroll" tabindex="0"><table><thead><tr><th>worker</th><th>state</th><th>lanes</th><th>step</th><th>samples</th><th>samples/s</th><th>cores</th><th>memory</th><th>network</th><th>host</th><th></th></tr></thead>
    <tbody>${run.workers.map((one) => html`<tr key=${one.name}><td><span class="dot c${place.get(one.name) % 10}" aria-hidden="true"></span>
        <a href=${link("run", name, { tab: "logs", log: `${one.name}.log` })}>${one.name}</a>${one.saves && one.state === "training" ? " (saves)" : ""}</td>
      <td><${Status} status=${one.state} />${one.holds_back > 0.15 && html` <span class="warn">holds the others back: they need ${Math.round(100 * one.holds_back)} % less</span>`}</td>
      <td>${one.lanes.join(" ")}</td><td class="n">${one.step}</td><td class="n">${count(one.samples)}</td><td class="n">${runs ? number(one.samples_per_s) : "–"}</td><${Usage} usage=${one.usage} now=${runs} /><td>${one.host}</td>
      <td>${live && one.state === "training" && html`<button onClick=${() => drain(one.name)}>Drain</button>`}</td></tr>`)}</tbody></table></div>
    ${run.servers.length > 0 && html`<div class="bar"><h2>Servers</h2>${live && html`<button onClick=${scaleServers}>Scale servers</button>`}</div>
      <div class="scroll" tabindex="0"><table><thead><tr><th>server</th><th>state</th><th>primary</th><th>backup</th><th>host</th><th></th></tr></thead>
      <tbody>${run.servers.map((one) => html`<tr key=${one.name}><td><a href=${link("run", name, { tab: "logs", log: `${one.name}.log` })}>${one.name}</a></td><td><${Status} status=${one.state} /></td><td class="n">${size(one.primary_bytes)}</td><td class="n">${size(one.backup_bytes)}</td><td>${one.host}</td>
        <td>${live && one.state === "serving" && html`<button onClick=${() => drain(one.name)}>Drain</button>`}</td></tr>`)}</tbody></table></div>`}
    ${live && html`<div class="bar"><h2>Stacks</h2><button onClick=${look} disabled=${stacks?.busy}>${stacks?.busy ? "…" : "Where is every thread now?"}</button></div>`}
    ${stacks && html`<${ErrorBox} problem=${stacks.problem} />${stacks.processes.map((one) => html`<h3>${one.who}, process ${one.pid} on ${one.host}</h3>
      ${one.problem ? html`<p class="warn">${one.problem}</p>` : html`<pre class="log" tabindex="0">${one.text}</pre>`}`)}`}
    <${Profiles} run=${run} me=${me} name=${name} />${dialog}`;
}

// The last sample of what a worker uses, every two seconds. Of a run that has ended, only its memory says something.
function Usage({ usage, now }) {
  if (!("rss_bytes" in usage)) return html`<td class="n">–</td><td class="n">–</td><td class="n">–</td>`;
  const total = usage.rss_bytes + usage.room_bytes;
  return html`<td class="n">${now ? number(usage.cpu) : "–"}</td>
    <td class="n"><meter max=${total || 1} high=${0.95 * total} value=${usage.rss_bytes} aria-label="memory"></meter> ${size(usage.rss_bytes)} of ${size(total)}${"device_bytes" in usage ? html`<br />GPU ${size(usage.device_bytes)} of ${size(usage.device_total_bytes)}` : ""}</td>
    <td class="n">${now ? `${size(usage.net_bytes_s)}/s` : "–"}</td>`;
}

// Profiles of some steps: made on the live run, kept afterwards.
function Profiles({ run, me, name }) {
  const { value, problem, refresh } = useAnswer(() => get(`${runPath(name)}/profiles`), name);
  const [state, setState] = useState({ busy: false, problem: null });
  const [steps, setSteps] = useState("20");
  const make = async (event) => {
    event.preventDefault();
    setState({ busy: true, problem: null });
    try { await act(`${runPath(name)}/profile`, { steps: Number(steps) }); setState({ busy: false, problem: null }); refresh(); } catch (one) { setState({ busy: false, problem: one }); }
  };
  const live = maySteer(run, me, name);
  if (problem?.status === 404 || (!live && !value?.length)) return null;
  return html`<div class="bar"><h2>Profiles</h2>${live && html`<form onSubmit=${make}><label class="check"><input type="number" min="1" max="200" value=${steps} onInput=${(e) => setSteps(e.target.value)} />steps</label>
      <button disabled=${state.busy}>${state.busy ? "…" : "Profile"}</button></form>`}</div><${ErrorBox} problem=${state.problem || problem} />
    ${(value || []).map((one) => html`<details key=${one.name}><summary>${one.steps} steps from step ${count(one.first_step)} on, of ${one.workers.join(", ")}</summary>
      <p><a href=${`/api/v1/${runPath(name)}/profiles/${one.name}`} download=${`${run.name}-${one.first_step}.trace.json.gz`}>Trace (${size(one.size_bytes)})</a> <span class="hint">opens in chrome://tracing or Perfetto</span></p>
      ${Object.entries(one.missing).map(([who, why]) => html`<p class="warn">${who}: ${why}</p>`)}
      <div class="scroll" tabindex="0"><table><thead><tr><th>operator</th><th>calls</th><th>by itself</th><th>in all</th></tr></thead>
        <tbody>${one.operators.map((row) => html`<tr><td><code>${row.name}</code></td><td class="n">${row.calls}</td><td class="n">${seconds(row.self_us / 1e6)}</td><td class="n">${seconds(row.total_us / 1e6)}</td></tr>`)}</tbody></table></div></details>`)}`;
}

const EXACT = new Map([[true, "yes"], [false, "no"], [null, "not checked"]]);

function Receipt({ name, status }) {
  const { value, problem } = useAnswer(() => get(`${runPath(name)}/receipt`), name + status);
  if (!value) return html`<${ErrorBox} problem=${problem} />`;
  if (value.damage) return html`<p class="warn">The receipt is damaged: ${value.damage}</p>`;
  const receipt = value.receipt;
  if (!receipt) return html`<p class="empty">There is no receipt before the run has finished.</p>`;
  const rest = Object.entries(receipt).filter(([key]) => !["exact", "why", "weights_sha256", "run"].includes(key));
  return html`${"exact" in receipt && html`<p class="proof ${receipt.exact === true ? "good" : ""}"><b>exact: ${EXACT.get(receipt.exact)}</b> ${receipt.why}<br />
      SHA-256 of the weights <code>${receipt.weights_sha256}</code></p>`}
    <div class="scroll" tabindex="0"><table class="pairs"><tbody>${rest.map(([key, one]) => html`<tr><th scope="row">${key}</th>
      <td>${one !== null && typeof one === "object" ? html`<pre>${JSON.stringify(one, null, 1)}</pre>` : number(one)}</td></tr>`)}</tbody></table></div>`;
}

function Job({ name, query }) {
  const { value, problem } = useAnswer(() => get(`${runPath(name)}/job`), name);
  const other = query.with || "";
  const [typed, setTyped] = useState(other);
  const { value: diff, problem: failed } = useAnswer(async () => (other ? get(`${runPath(name)}/diff?with=${encodeURIComponent(other)}`) : null), `${name} ${other}`);
  const rows = diff ? diff.differs.filter((field) => field.startsWith("job ")) : [];
  return html`${!isFile && html`<form class="bar" onSubmit=${(e) => { e.preventDefault(); change({ with: typed.trim() }); }}><label>Difference to <input value=${typed} placeholder="another run" onInput=${(e) => setTyped(e.target.value)} /></label> <button>Show</button>
      ${other && html`<button type="button" onClick=${() => { setTyped(""); change({ with: "" }); }}>Hide</button>`}</form>`}
    <${ErrorBox} problem=${failed} />
    ${other && diff && (rows.length ? html`<div class="scroll" tabindex="0"><table class="diff"><thead><tr><th>field</th>${diff.runs.map((one) => html`<th><a href=${link("run", one, { tab: "job" })}>${one}</a></th>`)}</tr></thead>
      <tbody>${rows.map((field) => html`<tr><th scope="row">${field.slice(4)}</th>${diff.fields[field].map((cell) => html`<td>${number(cell)}</td>`)}</tr>`)}</tbody></table></div>` : html`<p class="proof good">The job files say the same.</p>`)}
    <${ErrorBox} problem=${problem} />${value && html`<pre class="job" tabindex="0">${value.yaml}</pre>`}`;
}
