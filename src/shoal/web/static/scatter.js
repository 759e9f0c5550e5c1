// Trials by two metrics, with the Pareto front: the trials that no other one beats in every metric.
import { useEffect, useRef, useState } from "./vendor/hooks.js";
import { html, number } from "./show.js";

const HEIGHT = 220;
const PAD = 60;

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function draw(canvas, trials, [x, y]) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = width * ratio;
  canvas.height = HEIGHT * ratio;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.font = "12px system-ui";
  const range = (metric) => {
    const all = trials.map((one) => one.values[metric]);
    const least = Math.min(...all), most = Math.max(...all);
    return [least, most > least ? most - least : 1];
  };
  const [x0, dx] = range(x.metric);
  const [y0, dy] = range(y.metric);
  const place = (one) => [PAD + (width - PAD - 12) * ((one.values[x.metric] - x0) / dx), 12 + (HEIGHT - PAD - 12) * (1 - (one.values[y.metric] - y0) / dy)];
  const front = trials.filter((one) => one.on_front).sort((a, b) => a.values[x.metric] - b.values[x.metric]);
  ctx.strokeStyle = ctx.fillStyle = "#e76f51";
  ctx.beginPath();
  front.forEach((one, n) => { const [left, top] = place(one); if (n) ctx.lineTo(left, top); else ctx.moveTo(left, top); });
  ctx.stroke();
  for (const one of trials) {
    const [left, top] = place(one);
    ctx.fillStyle = one.on_front ? "#e76f51" : "#7ba6c4";
    ctx.beginPath();
    ctx.arc(left, top, one.on_front ? 5 : 3.5, 0, 7);
    ctx.fill();
  }
  ctx.fillStyle = colour("--dim");
  ctx.fillText(number(x0), PAD, HEIGHT - 24);
  ctx.textAlign = "right";
  ctx.fillText(number(x0 + dx), width - 12, HEIGHT - 24);
  ctx.fillText(number(y0 + dy), PAD - 6, 16);
  ctx.fillText(number(y0), PAD - 6, HEIGHT - PAD);
  ctx.textAlign = "center";
  ctx.fillText(`${x.metric} ${x.sign > 0 ? "→" : "←"} better`, width / 2, HEIGHT - 8);
}

export function Scatter({ goals, trials }) {
  const canvas = useRef(null);
  const [second, setSecond] = useState(1);
  const axes = [goals[second], goals[0]];
  const known = trials.filter((one) => axes.every((goal) => typeof one.values[goal.metric] === "number"));
  useEffect(() => {
    if (!canvas.current || !known.length) return undefined;
    const again = () => draw(canvas.current, known, axes);
    again();
    const resized = new ResizeObserver(again);
    resized.observe(canvas.current);
    return () => resized.disconnect();
  }, [trials, second]);
  const told = known.filter((one) => one.on_front).map((one) => `trial ${one.trial}: ${axes.map((goal) => `${goal.metric} ${number(one.values[goal.metric])}`).join(", ")}`);
  return html`<figure class="chart"><figcaption><b>Pareto front</b> <span class="now">${goals[0].metric} ${goals[0].sign > 0 ? "↑" : "↓"} against${" "}
      ${goals.length > 2 ? html`<select aria-label="Second metric" onChange=${(e) => setSecond(Number(e.target.value))}>${goals.slice(1).map((one, n) => html`<option value=${n + 1} selected=${second === n + 1}>${one.metric}</option>`)}</select>` : axes[0].metric}</span></figcaption>
    ${known.length ? html`<canvas ref=${canvas} class="timeline scatter" role="img" aria-label=${`The front: ${told.join("; ")}`}></canvas>` : html`<p class="empty">No trial has both values yet.</p>`}</figure>`;
}
