// The log of every worker and server: the end of it, live, and a search over all of them.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { get, runPath } from "./api.js";
import { html, ErrorBox, size, useAnswer } from "./show.js";
import { change } from "./route.js";

const FOLLOW_MS = 1000;
const MAX_LINES = 5000;

export function Logs({ name, live, query }) {
  const { value: files, problem } = useAnswer(() => get(`${runPath(name)}/logs`), name, live ? 3000 : 0);
  const [find, setFind] = useState(query.find || "");
  const chosen = query.log || files?.find((one) => one.size_bytes)?.name || files?.[0]?.name;
  const { value: found, problem: failed } = useAnswer(async () => (query.find ? get(`${runPath(name)}/search?find=${encodeURIComponent(query.find)}`) : null), `${name} ${query.find}`);
  if (!files) return html`<${ErrorBox} problem=${problem} />`;
  if (!files.length) return html`<p class="empty">No worker has a log yet.</p>`;
  return html`<div class="bar"><label>Log <select value=${chosen} onChange=${(e) => change({ log: e.target.value })}>
      ${files.map((one) => html`<option value=${one.name}>${one.name} (${size(one.size_bytes)})</option>`)}</select></label>
    <form onSubmit=${(e) => { e.preventDefault(); change({ find }); }}><input type="search" aria-label="Search all logs" placeholder="search all logs" value=${find}
      onInput=${(e) => setFind(e.target.value)} /> <button>Search</button></form></div>
    <${ErrorBox} problem=${failed} />
    ${found && query.find && html`<h2>${found.matches.length}${found.more ? " or more" : ""} lines with “${found.text}”</h2>
      <pre class="log" tabindex="0">${found.matches.map((one) => `${one.name}: ${one.line}\n`).join("")}</pre>`}
    <${Log} key=${chosen} name=${name} log=${chosen} live=${live} />`;
}

function Log({ name, log, live }) {
  const [lines, setLines] = useState([]);
  const [problem, setProblem] = useState(null);
  const box = useRef(null);
  const end = useRef(null);
  useEffect(() => {
    let timer = null;
    let over = false;
    const read = async () => {
      try {
        const path = `${runPath(name)}/logs/${log}`;
        const piece = await get(end.current === null ? `${path}?tail=500` : `${path}?after=${end.current}`);
        if (over) return;
        end.current = piece.end;
        const stays = box.current && box.current.scrollTop + box.current.clientHeight >= box.current.scrollHeight - 30;
        setLines((old) => (piece.lines.length ? [...old, ...piece.lines].slice(-MAX_LINES) : old));
        if (stays) requestAnimationFrame(() => { if (box.current) box.current.scrollTop = box.current.scrollHeight; });
        setProblem(null);
      } catch (one) { setProblem(one); }
      if (live && !over) timer = setTimeout(read, FOLLOW_MS);
    };
    read();
    return () => { over = true; clearTimeout(timer); };
  }, [name, log, live]);
  return html`<${ErrorBox} problem=${problem} /><pre class="log" ref=${box} tabindex="0" aria-label=${log}>${lines.length ? lines.join("\n") : "(empty)"}</pre>`;
}
