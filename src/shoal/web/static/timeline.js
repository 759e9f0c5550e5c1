// Where each worker's time went, what happened when, and who carried which lanes at a moment.
import { useEffect, useRef } from "./vendor/hooks.js";
import { get, runPath } from "./api.js";
import { change } from "./route.js";
import { html, ErrorBox, KINDS, seconds, useAnswer } from "./show.js";

const ROW = 26;
const GAP = 6;
const LEFT = 84;
const SHOWN = 300; // marks in the list
const MARKED = { worker_died: "#d62828", server_died: "#d62828", evicted: "#d62828", failed: "#d62828", view: "#6c757d", resumed: "#457b9d", replan: "#9d6bb5" };
const STEPS = ["view", "worker_died", "server_died", "evicted", "left", "server_left", "resumed", "replan", "failed", "finished"];
const GONE = { worker_died: "died,", server_died: "died,", evicted: "was put out,", left: "left," };

function draw(canvas, page) {
  const names = Object.keys(page.workers).sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const width = canvas.clientWidth;
  const ratio = devicePixelRatio || 1;
  const height = names.length * (ROW + GAP) + 18;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.font = "12px system-ui";
  const parts = Math.max(1, ...names.flatMap((name) => Object.values(page.workers[name]).map((one) => one.length)));
  const step = (width - LEFT) / parts;
  names.forEach((name, row) => {
    const top = row * (ROW + GAP);
    ctx.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--dim");
    ctx.fillText(name, 0, top + ROW / 2 + 4);
    for (let n = 0; n < parts; n += 1) {
      const total = Object.values(page.workers[name]).reduce((sum, one) => sum + (one[n] || 0), 0);
      let y = top + ROW;
      const scale = ROW / Math.max(page.width_s, total);
      for (const [kind, [, colour]] of Object.entries(KINDS)) {
        const tall = (page.workers[name][kind]?.[n] || 0) * scale;
        if (tall > 0) { ctx.fillStyle = colour; ctx.fillRect(LEFT + n * step, y - tall, Math.max(step - 0.5, 0.5), tall); y -= tall; }
      }
    }
  });
  const worst = (mark) => MARKED[mark.kind] === "#d62828"; // drawn last: a death brings a view
  for (const mark of [...page.marks].sort((a, b) => worst(a) - worst(b))) {
    if (!MARKED[mark.kind] || page.start_t === null) continue;
    const x = LEFT + ((mark.t - page.start_t) / (page.width_s * parts)) * (width - LEFT);
    if (x < LEFT || x > width) continue;
    ctx.fillStyle = MARKED[mark.kind];
    ctx.fillRect(x, 0, 1.5, height - 14);
  }
  ctx.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--dim");
  const begin = page.start_t - (page.started_t ?? page.start_t); // the list below counts from the start too
  ctx.fillText(begin > 0 ? seconds(begin) : "0 s", LEFT, height - 3);
  const end = seconds(begin + page.width_s * parts);
  ctx.fillText(end, width - ctx.measureText(end).width, height - 3);
}

export function Timeline({ name, run, query }) {
  const { value, problem } = useAnswer(() => get(`${runPath(name)}/timeline?bins=160`), name, ["training", "starting"].includes(run.status) ? 2000 : 0);
  const canvas = useRef(null);
  useEffect(() => {
    if (!value || !canvas.current) return undefined;
    const again = () => draw(canvas.current, value);
    again();
    const resized = new ResizeObserver(again);
    resized.observe(canvas.current);
    return () => resized.disconnect();
  }, [value]);
  if (!value) return html`<${ErrorBox} problem=${problem} />`;
  const total = Object.values(run.times).reduce((sum, one) => sum + one, 0) || 1;
  return html`<div class="legend">${Object.entries(KINDS).filter(([kind]) => run.times[kind] > 0).map(([kind, [label]]) => html`<span><i class=${`k-${kind}`}></i>${`${label} `}${seconds(run.times[kind])} (${Math.round((100 * run.times[kind]) / total)} %)</span>`)}</div>
    <canvas ref=${canvas} class="timeline" role="img" aria-label="Time of each worker by kind; the legend has the sums"></canvas>
    <p class="hint">Height: what the worker's time in that part of the run was spent on. Red lines: deaths. Grey lines: new views.</p>
    <${History} marks=${value.marks} start=${value.started_t} left=${value.left_out} at=${query.at} />`;
}

// What the run looked like after each view, death, departure and restart.
function History({ marks, start, left, at }) {
  const moments = marks.filter((mark) => STEPS.includes(mark.kind) && (mark.kind !== "view" || Object.keys(mark.carries).length));
  const shown = at === undefined || !moments[Number(at)] ? moments.length - 1 : Number(at);
  const moment = moments[shown];
  const before = moments.slice(0, shown + 1);
  const view = before.filter((mark) => mark.kind === "view").at(-1);
  const since = before.slice(before.indexOf(view) + 1);
  const gone = new Map(since.filter((mark) => GONE[mark.kind]).map((mark) => [mark.who, GONE[mark.kind]]));
  const place = new Map([...new Set(moments.flatMap((mark) => Object.keys(mark.carries)))].sort((a, b) => a.localeCompare(b, "en", { numeric: true })).map((who, n) => [who, n]));
  return html`<h2>History</h2>
    ${moment && html`<label class="slider"><span>${shown + 1} of ${moments.length}: <b>${markText(moment)}</b>, step ${moment.step}, after ${seconds(moment.t - start)}</span>
      <input type="range" min="0" max=${moments.length - 1} value=${shown} aria-valuetext=${`${markText(moment)} at step ${moment.step}`} onInput=${(e) => change({ at: e.target.value })} /></label>
      ${view && html`<ul class="carries">${Object.entries(view.carries).map(([who, lanes]) => html`<li class=${gone.has(who) ? "gone" : ""}><span class="dot c${place.get(who) % 10}" aria-hidden="true"></span><b>${who}</b> ${gone.get(who) || ""} ${lanes.length ? `lanes ${lanes.join(" ")}` : "no lanes"}</li>`)}</ul>`}`}
    ${left > 0 && html`<p class="hint">${left.toLocaleString("en")} more are not kept: first saves, then the oldest after the start.</p>`}
    ${marks.length > SHOWN && html`<p class="hint">The newest ${SHOWN} of ${marks.length.toLocaleString("en")} are listed.</p>`}
    <div class="scroll tall" tabindex="0" role="region" aria-label="Everything that happened"><table><thead><tr><th>after</th><th>step</th><th>what</th><th>who</th></tr></thead><tbody>
      ${[...marks].reverse().slice(0, SHOWN).map((mark) => html`<tr class=${[MARKED[mark.kind] === "#d62828" ? "bad" : "", mark === moment ? "at" : ""].join(" ")}><td class="n">${seconds(mark.t - start)}</td>
        <td class="n">${mark.step}</td><td>${mark.kind.replaceAll("_", " ")}</td><td>${mark.who}</td></tr>`)}</tbody></table></div>`;
}

function markText(mark) { return mark.kind === "view" ? "a new view" : `${mark.kind.replaceAll("_", " ")}${mark.who === "driver" ? "" : ` (${mark.who})`}`; }
