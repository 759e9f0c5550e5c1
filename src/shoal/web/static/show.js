// Numbers, times and small parts of pages.
import { h } from "./vendor/preact.js";
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);

export const KINDS = {
  compute_s: ["compute", "#2a9d8f"], data_s: ["data", "#8ab17d"], exchange_s: ["exchange", "#e9c46a"],
  waiting_s: ["waiting", "#c9ccd1"], saving_s: ["saving", "#457b9d"], evaluation_s: ["evaluation", "#9d6bb5"],
  recovery_s: ["recovery", "#e76f51"], startup_s: ["start-up", "#8d99ae"], checking_s: ["checking", "#b5838d"],
  export_s: ["export", "#6a994e"],
};

export function number(value) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e6)) return value.toExponential(3).replace(/\.?0*e/, "e");
  return String(+value.toPrecision(size < 1 ? 4 : size < 1e5 ? 5 : 6));
}

export function count(value) { return Math.round(value).toLocaleString("en"); }

export function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let n = 0;
  while (bytes >= 1000 && n < 4) { bytes /= 1000; n += 1; }
  return `${n ? bytes.toFixed(1) : bytes} ${units[n]}`;
}

export function seconds(value) {
  if (typeof value !== "number") return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${String(Math.floor(value % 60)).padStart(2, "0")} s`;
  const minutes = Math.round(value / 60);
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function when(t) {
  if (!t) return "–";
  const date = new Date(t * 1000);
  const two = (n) => String(n).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

export function metricsText(metrics, most = 3) {
  return Object.entries(metrics).slice(0, most).map(([name, value]) => `${name} ${number(value)}`).join("  ");
}

export const Status = ({ status }) =>
  html`<span class="status ${String(status).replace(/[^a-z]/g, "-")}"><i aria-hidden="true"></i>${status}</span>`;

// Commands in a sentence stand between backticks.
export const told = (text) => String(text ?? "").split("`").map((part, n) => (n % 2 ? html`<code>${part}</code>` : part));

export function ErrorBox({ problem }) {
  return problem && html`<div class="error" role="alert"><b>${problem.code} ${told(problem.message)}</b>
    ${problem.fix && html`<div>${told(problem.fix)}</div>`}</div>`;
}

const SHARE = 50; // a page waits at least so many times what an answer took before it asks again
export const pause = (every, tookMs) => Math.max(every, SHARE * tookMs);

// The value of an asynchronous function, again every `every` ms, or later if it takes long, while the page is visible.
export function useAnswer(ask, key, every = 0) {
  const [found, setFound] = useState({ value: null, problem: null });
  const current = useRef(key);
  current.current = key;
  const refresh = async () => {
    try {
      const value = await ask();
      if (current.current === key) setFound({ value, problem: null });
    } catch (problem) {
      if (current.current === key) setFound((old) => ({ value: old.value, problem }));
    }
  };
  useEffect(() => {
    let timer = null;
    let before = 0; // one long answer changes nothing: the first reads what is kept afterwards
    const again = async () => {
      const began = performance.now();
      if (!document.hidden || !timer) await refresh();
      const took = performance.now() - began;
      if (every && timer !== "over") timer = setTimeout(again, pause(every, Math.min(took, before)));
      before = took;
    };
    again();
    return () => { clearTimeout(timer); timer = "over"; };
  }, [key, every]);
  return { ...found, refresh };
}

// What was done, for the page that is shown next.
let left = "";
export const leave = (text) => { left = text; };
export const takeLeft = () => { const text = left; left = ""; return text; };

// A question before something is done. `ask({title, text, button, action, danger, …})` opens it. `option`: a box to tick, and what the question says then.
export function useDialog() {
  const [asked, setAsked] = useState(null);
  const box = useRef(null);
  useEffect(() => { if (asked && box.current && !box.current.open) box.current.showModal(); }, [asked]);
  const dialog = asked && html`<${Question} ...${asked} box=${box} close=${() => setAsked(null)} />`;
  return [dialog, setAsked];
}

function Question({ title, text, label = "", value = "", must = null, option = null, button = "OK", danger, action, box, close }) {
  const [typed, setTyped] = useState(value);
  const [ticked, setTicked] = useState(false);
  const [state, setState] = useState({ busy: false, problem: null });
  const submit = async (event) => {
    event.preventDefault();
    setState({ busy: true, problem: null });
    try { await action(typed, ticked); box.current?.close(); close(); } catch (problem) { setState({ busy: false, problem }); }
  };
  return html`<dialog ref=${box} onClose=${close} aria-labelledby="question">
    <form onSubmit=${submit}>
      <h2 id="question">${title}</h2>
      <p>${ticked ? option.warning : text}</p>
      ${label && html`<label>${label}<input autofocus value=${typed} onInput=${(e) => setTyped(e.target.value)} /></label>`}
      ${option && html`<label class="option"><input type="checkbox" checked=${ticked} onChange=${(e) => setTicked(e.target.checked)} />${option.text}</label>`}
      <${ErrorBox} problem=${state.problem} />
      <div class="buttons">
        <button type="button" onClick=${() => box.current.close()}>Cancel</button>
        <button class=${danger ? "danger" : "primary"} disabled=${state.busy || (must !== null && typed !== must)}>
          ${state.busy ? "…" : ticked ? option.button : button}</button>
      </div>
    </form></dialog>`;
}
