// Runs side by side: overlaid curves, what differs, and whether they have the same bits.
import { useEffect, useMemo, useState } from "./vendor/hooks.js";
import { follow, get, runPath } from "./api.js";
import { html, ErrorBox, number, useAnswer } from "./show.js";
import { change, link } from "./route.js";
import { Chart, COLOURS, toLine } from "./chart.js";
import { Parallel } from "./parallel.js";

const LIVE_MS = 3000;

export function Compare({ query }) {
  const names = (query.runs || "").split(",").filter(Boolean);
  const [typed, setTyped] = useState(names.join(" "));
  const all = query.all === "1"; // in the address, as every view
  const key = names.join(",");
  const [live, setLive] = useState(false); // not all of them have finished
  const { value, problem } = useAnswer(async () => (names.length ? get(`compare?runs=${encodeURIComponent(key)}`) : null), `${key} ${live}`, live ? LIVE_MS : 0);
  useEffect(() => setLive(value?.same_bits === null), [value]);
  return html`<div class="bar"><h1>Compare</h1><form class="grow" onSubmit=${(e) => { e.preventDefault(); change({ runs: typed.split(/[\s,]+/).filter(Boolean).join(",") }); }}>
      <input class="filter" aria-label="Runs to compare" placeholder="names of runs" value=${typed} onInput=${(e) => setTyped(e.target.value)} /> <button>Show</button></form></div>
    <${ErrorBox} problem=${problem} />
    ${!names.length && html`<p class="empty">Select runs in the list (key x), then Compare (key c); or write their names.</p>`}
    ${value && html`<${Verdict} value=${value} /><${Overlay} names=${value.runs} live=${live} />
      ${value.runs.length > 1 && html`<${Parallel} value=${value} />`}
      <div class="bar"><h2>${all ? "Everything" : "What differs"}</h2><label class="check"><input type="checkbox" checked=${all} onChange=${() => change({ all: all ? "" : "1" })} />all fields</label></div>
      <div class="scroll" tabindex="0"><table class="diff"><thead><tr><th></th>${value.runs.map((run, n) => html`<th><span class="dot c${n % 10}" aria-hidden="true"></span><a href=${link("run", run)}>${run}</a></th>`)}</tr></thead>
        <tbody>${Object.entries(value.fields).filter(([name]) => all || value.differs.includes(name)).map(([name, cells]) => html`<tr class=${value.differs.includes(name) ? "differs" : ""}>
          <th scope="row">${name.replace(/^job /, "")}</th>${cells.map((cell) => html`<td>${number(cell)}</td>`)}</tr>`)}</tbody></table></div>`}`;
}

function Verdict({ value }) {
  if (value.runs.length < 2) return null;
  if (value.same_bits === true) return html`<p class="proof good"><b>The same bits.</b> All ${value.runs.length} runs have the same weights, by SHA-256.</p>`;
  const { part_after: after, part_at: at } = value; // a row may count several steps
  const parted = at === null ? "" : at - after === 1 ? ` Their losses part at step ${at}.` : ` Their losses part after step ${after}, at the latest at step ${at}.`;
  if (value.same_bits === false) return html`<p class="proof"><b>Different weights.</b>${parted}</p>`;
  return html`<p class="proof">Not all of them have finished: whether the weights are the same is not known yet.${parted}</p>`;
}

function Overlay({ names, live }) {
  const [found, setFound] = useState([]);
  const [problem, setProblem] = useState(null);
  const key = names.join(",");
  useEffect(() => {
    let over = false;
    const points = Math.max(100, Math.min(500, Math.floor(10000 / names.length)));
    const pages = new Map();
    const shown = () => setFound(names.filter((name) => pages.has(name)).map((name) => [name, pages.get(name)]));
    const load = async (asked) => {
      for (const name of asked) {
        try { pages.set(name, await get(`${runPath(name)}/series?points=${points}`)); setProblem(null); } catch (one) { setProblem(one); }
        if (over) return;
        if (pages.size % 10 === 0) shown();
      }
      shown();
    };
    const changed = new Set(); // runs with new rows: only they are asked for again
    let busy = load(names).then(() => { busy = null; });
    const timer = live && setInterval(() => {
      if (busy || !changed.size) return;
      const asked = [...changed];
      changed.clear();
      busy = load(asked).then(() => { busy = null; });
    }, LIVE_MS);
    const end = live ? follow(key, "", ({ run, rows }) => { if (rows.length) changed.add(run); }, () => {}, () => { names.forEach((one) => changed.add(one)); return ""; }) : () => {};
    return () => { over = true; clearInterval(timer); end(); };
  }, [key, live]);
  const charts = useMemo(() => {
    const series = [...new Set(found.flatMap(([, list]) => list.names))].filter((name) => name !== "samples/s" && name !== "lr");
    return series.map((title) => [title, found.flatMap(([name, list]) => list.series.filter((one) => one.name === title).map((one) => toLine(name, one)))]);
  }, [found]);
  return html`<${ErrorBox} problem=${problem} /><div class="legend">${names.slice(0, 30).map((name, n) => html`<span><i class="dot c${n % COLOURS.length}"></i>${name}</span>`)}</div>
    <div class="charts">${charts.map(([title, lines]) => html`<${Chart} key=${title} title=${title} lines=${lines} />`)}</div>`;
}
