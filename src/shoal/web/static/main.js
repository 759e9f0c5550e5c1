// Login by the link's code, the frame of the page, and which page is shown.
import { render } from "./vendor/preact.js";
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { get, post } from "./api.js";
import { html, ErrorBox } from "./show.js";
import { current, go, isForPage, link } from "./route.js";
import { Runs } from "./runs.js";
import { Run } from "./run.js";
import { Compare } from "./compare.js";
import { Searches } from "./searches.js";
import { Queue } from "./queue.js";
import { Compressions } from "./compressions.js";
import { Disk } from "./disk.js";

const PAGES = { runs: Runs, run: Run, compare: Compare, searches: Searches, queue: Queue, compressions: Compressions, disk: Disk };
const LINKS = [["runs", "Runs"], ["compare", "Compare"], ["searches", "Searches"], ["queue", "Queue"], ["compressions", "Compressions"], ["disk", "Disk"]];
const WHOLE = ["queue", "disk"]; // pages about all runs: tokens for some runs may not see them

// The code or token stands after `#`, which browsers never send; it leaves the address at once.
async function login() {
  const found = /^#(?:code|token)=([\w-]+)$/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", "/#/runs");
  await post("session", { secret: found[1] });
}

function Login({ problem, onDone }) {
  const [secret, setSecret] = useState("");
  const [failed, setFailed] = useState(problem);
  const submit = async (event) => {
    event.preventDefault();
    try { await post("session", { secret: secret.trim() }); onDone(); } catch (one) { setFailed(one); }
  };
  return html`<main id="main" class="login"><h1>Shoal</h1>
    <p>Open the link that <code>shoal web</code> printed, or enter a token (<code>shoal tokens --create NAME</code>).</p>
    <form onSubmit=${submit}><label>Token or code <input type="password" autocomplete="off" value=${secret}
      onInput=${(e) => setSecret(e.target.value)} /></label> <button class="primary">Open</button></form>
    ${failed && failed.status !== 401 && html`<${ErrorBox} problem=${failed} />`}
    ${failed && secret && failed.status === 401 && html`<${ErrorBox} problem=${failed} />`}</main>`;
}

const KEYS = [["/", "filter"], ["j k", "next, previous run"], ["Enter", "open the run"], ["x", "select the run"],
  ["c", "compare the selected"], ["1 … 6, ← →", "parts of a run"], ["Esc", "back to the runs"], ["?", "this help"]];

function App() {
  const [me, setMe] = useState(undefined);
  const [problem, setProblem] = useState(null);
  const [where, setWhere] = useState(current());
  const [help, setHelp] = useState(false);
  const shown = useRef(false);
  shown.current = help;  // a key may come before the effects of the last one have run
  const begin = async () => {
    try { await login(); setWhere(current()); setMe(await get("me")); } catch (one) { setProblem(one); setMe(null); }
  };
  useEffect(() => { begin(); }, []);
  useEffect(() => {
    const moved = () => { if (/^#(code|token)=/.test(location.hash)) begin(); else setWhere(current()); };
    const pressed = (event) => {
      if (!isForPage(event)) return;
      if (event.key === "?") setHelp((old) => !old);
      if (event.key === "Escape") { if (shown.current) setHelp(false); else if (current().page !== "runs") go("runs"); }
    };
    addEventListener("hashchange", moved);
    addEventListener("keydown", pressed);
    return () => { removeEventListener("hashchange", moved); removeEventListener("keydown", pressed); };
  }, []);
  useEffect(() => { document.title = `${where.name || where.page} – Shoal`; }, [where.name, where.page]);
  if (me === undefined) return html`<main id="main" class="login" aria-busy="true"><p>…</p></main>`;
  if (me === null) return html`<${Login} problem=${problem} onDone=${begin} />`;
  const Page = PAGES[where.page] || Runs;
  return html`<header><a class="brand" href=${link("runs")}><img src="/static/icon.svg" alt="" width="22" height="22" />Shoal</a>
    <nav aria-label="Pages">${LINKS.filter(([page]) => me.runs === null || !WHOLE.includes(page)).map(([page, title]) => html`<a href=${link(page)}
      aria-current=${where.page === page ? "page" : null}>${title}</a>`)}</nav>
    <span class="who">${me.name} · ${me.role}</span>
    <button class="quiet" onClick=${() => setHelp(!help)} aria-expanded=${help} aria-label="Keyboard help">?</button></header>
    ${help && html`<aside class="help" aria-label="Keys"><dl>${KEYS.map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl></aside>`}
    <main id="main" tabindex="-1"><${Page} key=${where.page + where.name} name=${where.name} query=${where.query} me=${me} /></main>`;
}

render(html`<${App} />`, document.getElementById("app"));
