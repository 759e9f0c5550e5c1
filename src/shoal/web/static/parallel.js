// Parallel coordinates: an axis for each number that differs, a line for each run.
import { useEffect, useRef } from "./vendor/hooks.js";
import { COLOURS } from "./chart.js";
import { html, number } from "./show.js";

const HEIGHT = 200;
const MAX_AXES = 12;

const LOG_RATIO = 100; // values over such a range, as of a learning rate, are told apart on a logarithmic axis only

function axesOf(value) {
  const axes = value.differs.filter((name) => value.fields[name].filter((cell) => typeof cell === "number").length > 1).slice(0, MAX_AXES)
    .map((name) => {
      const numbers = value.fields[name].filter((cell) => typeof cell === "number");
      const least = Math.min(...numbers), most = Math.max(...numbers);
      return { path: name.replace(/^job /, "").split("."), cells: value.fields[name], least, most, scale: least > 0 && most / least >= LOG_RATIO ? Math.log : (x) => x };
    }).filter((axis) => axis.most > axis.least);
  const last = axes.map((axis) => axis.path.at(-1));
  const short = ({ path }) => path.slice(last.filter((one) => one === path.at(-1)).length > 1 ? -2 : -1).join(".");
  return axes.map((axis) => ({ ...axis, name: short(axis) + (axis.scale === Math.log ? " (log)" : "") }));
}

function draw(canvas, axes, runs) {
  const width = canvas.clientWidth;
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = HEIGHT * ratio;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.font = "12px system-ui";
  const x = (n) => 40 + (n * (width - 80)) / Math.max(axes.length - 1, 1);
  const share = ({ scale, least, most }, cell) => (scale(cell) - scale(least)) / (scale(most) - scale(least));
  const y = (axis, cell) => 34 + (HEIGHT - 60) * (1 - share(axis, cell));
  const dim = getComputedStyle(document.documentElement).getPropertyValue("--dim");
  runs.forEach((_, run) => {
    ctx.strokeStyle = COLOURS[run % COLOURS.length];
    ctx.globalAlpha = 0.8;
    ctx.beginPath();
    let open = false;
    axes.forEach((axis, n) => {
      const cell = axis.cells[run];
      if (typeof cell !== "number") { open = false; return; }
      if (open) ctx.lineTo(x(n), y(axis, cell)); else ctx.moveTo(x(n), y(axis, cell));
      open = true;
    });
    ctx.stroke();
  });
  ctx.globalAlpha = 1;
  axes.forEach((axis, n) => {
    ctx.fillStyle = dim;
    ctx.fillRect(x(n), 34, 1, HEIGHT - 60);
    const [align, at] = n === 0 ? ["left", 0] : n === axes.length - 1 ? ["right", width] : ["center", x(n)]; // names stay inside
    ctx.textAlign = align;
    ctx.fillText(axis.name.length > 16 ? `…${axis.name.slice(-15)}` : axis.name, at, 12);
    ctx.textAlign = "center";
    ctx.fillText(number(axis.most), x(n), 28);
    ctx.fillText(number(axis.least), x(n), HEIGHT - 10);
  });
}

export function Parallel({ value }) {
  const canvas = useRef(null);
  const axes = axesOf(value);
  useEffect(() => {
    if (!canvas.current) return undefined;
    const again = () => draw(canvas.current, axes, value.runs);
    again();
    const resized = new ResizeObserver(again);
    resized.observe(canvas.current);
    return () => resized.disconnect();
  }, [value]);
  return axes.length > 1 && html`<h2>Numbers that differ</h2><div class="scroll" tabindex="0"><canvas ref=${canvas} class="parallel" role="img"
    aria-label="Parallel coordinates of the numbers that differ; the table below has them"></canvas></div>`;
}
