// A chart of one or more series: a line of last values in a band from the least to the most of each bin.
import uPlot from "./vendor/uplot.js";
import { useEffect, useRef } from "./vendor/hooks.js";
import { html, number } from "./show.js";

export const COLOURS = ["#2a9d8f", "#e76f51", "#457b9d", "#e9a23b", "#9d6bb5", "#6a994e", "#c1517e", "#577590", "#b5651d", "#118ab2"];
const HEIGHT = 220;

function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// Columns that uPlot draws: one x for all, and three columns (least, most, last) for each series.
export function align(lines, byTime) {
  const xs = lines.map((line) => (byTime ? line.t.map((t) => t - (line.t0 ?? 0)) : line.step));
  const tables = lines.map((line, n) => [xs[n], line.least.length ? line.least : line.last, line.most.length ? line.most : line.last, line.last]);
  if (tables.length === 1) return tables[0];
  return uPlot.join(tables);
}

function options(lines, { byTime, log, width, onZoom, title }) {
  const axis = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") }, font: "12px system-ui" };
  const series = [{ label: byTime ? "s" : "step" }];
  const bands = [];
  lines.forEach((line, n) => {
    const colour = COLOURS[n % COLOURS.length];
    const first = series.length;
    series.push({ show: true, stroke: "transparent", points: { show: false } }, { show: true, stroke: "transparent", points: { show: false } },
      { label: line.label, stroke: colour, width: 1.5, spanGaps: true, points: { show: line.last.length < 2 }, value: (_, v) => number(v) });
    bands.push({ series: [first + 1, first], fill: `${colour}38` });
  });
  return {
    width, height: HEIGHT, title: undefined, series, bands, legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
    scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
    axes: [{ ...axis, size: 34 }, { ...axis, size: 62, values: (_, ticks) => ticks.map((v) => (v === null ? "" : number(v))) }],
    hooks: {
      setSelect: [(plot) => {
        if (plot.select.width > 4 && onZoom) {
          onZoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
          plot.setSelect({ width: 0, height: 0, left: 0, top: 0 }, false);
        }
      }],
      draw: [(plot) => {
        plot.ctx.fillStyle = "#d62828";
        for (const line of lines) for (const x of line.marks || []) {
          const left = plot.valToPos(x, "x", true);
          if (left >= plot.bbox.left && left <= plot.bbox.left + plot.bbox.width) plot.ctx.fillRect(left - 1, plot.bbox.top, 2, 8);
        }
      }],
      setCursor: [(plot) => {
        const text = plot.root.parentElement?.parentElement?.querySelector(".reading");
        if (!text) return;
        const at = plot.cursor.idx;
        text.textContent = at === null || at === undefined ? "" :
          `${byTime ? `${number(plot.data[0][at])} s` : `step ${plot.data[0][at]}`}: ${lines.map((line, n) => [line.label, plot.data[3 * n + 3][at]])
            .filter(([, v]) => v !== null && v !== undefined).slice(0, 4).map(([label, v]) => `${lines.length > 1 ? `${label} ` : ""}${number(v)}`).join("  ")}`;
      }],
    },
  };
}

export function Chart({ title, lines, byTime = false, log = false, onZoom = null, onReset = null }) {
  const box = useRef(null);
  const plot = useRef(null);
  const shape = JSON.stringify([lines.map((line) => line.label), byTime, log, title]);
  const data = align(lines, byTime);
  useEffect(() => {
    const make = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(lines, { byTime, log, width: box.current.clientWidth, onZoom, title }), data, box.current);
      plot.current.over.addEventListener("dblclick", () => onReset?.());
    };
    make();
    const resized = new ResizeObserver(() => {
      if (plot.current && box.current.clientWidth) plot.current.setSize({ width: box.current.clientWidth, height: HEIGHT });
    });
    resized.observe(box.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", make);
    return () => { resized.disconnect(); scheme.removeEventListener("change", make); plot.current?.destroy(); plot.current = null; };
  }, [shape]);
  useEffect(() => { plot.current?.setData(data); }, [data]);
  const last = lines.length === 1 ? lines[0].last.at(-1) : null;
  return html`<figure class="chart"><figcaption><b>${title}</b> ${last !== null && html`<span class="now">${number(last)}</span>`}
    <span class="reading"></span>${lines.some((line) => line.marks?.length) && html`<span class="warn">NaN or infinite at the red marks</span>`}</figcaption>
    <div ref=${box} class="plot" role="img" aria-label=${`${title}: ${lines.map((line) => (line.step.length ? `${line.label} is ${number(line.last.at(-1))} at step ${line.step.at(-1)}` : `${line.label} has no points here`)).join(", ")}`}></div></figure>`;
}

export function toLine(label, page, byTime = false) {
  const at = new Map(page.step.map((step, n) => [step, page.t[n] - (page.t[0] || 0)]));
  return { label, step: page.step, t: page.t, t0: page.t[0], last: page.last, least: page.least, most: page.most,
    marks: byTime ? page.not_finite.map((step) => at.get(step)) : page.not_finite };
}
