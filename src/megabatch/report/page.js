"use strict";
// Draws the figures of the page, again whenever a switch is changed. What is hidden is left out.

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const touch = !matchMedia("(hover: hover)").matches; // a finger is to scroll the page; buttons zoom
const config = {
  responsive: true,
  displaylogo: false,
  plotlyServerURL: "", // plotly's own buttons would offer to send the plot there
  displayModeBar: touch ? true : "hover",
  modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
};
const printWidth = 330;

function chosen(name) {
  const input = document.querySelector(`input[name="${name}"]:checked`);
  return input === null ? null : input.value;
}

function shown(trace, axis, view, groups) {
  if ((trace.view && trace.view !== view) || (trace.group !== undefined && !groups.has(trace.group))) return null;
  const { xs, group, view: _, ...plain } = trace;
  return xs ? { ...plain, x: xs[axis] } : plain;
}

function draw(id, width) {
  const figure = data.figures[id];
  const element = document.getElementById(id);
  const panel = getComputedStyle(element.parentElement);
  const axis = chosen("axis");
  const groups = new Set([...document.querySelectorAll('input[name="group"]:checked')].map((box) => Number(box.value)));
  const traces = figure.traces.map((trace) => shown(trace, axis, chosen("view") || "runs", groups)).filter(Boolean);
  const switched = figure.traces.some((trace) => trace.xs);
  const lines = { gridcolor: panel.borderTopColor, zerolinecolor: panel.borderTopColor, automargin: true };
  const layout = {
    showlegend: false,
    hovermode: "closest",
    hoverdistance: 60,
    height: 240,
    dragmode: touch ? false : "zoom",
    uirevision: axis, // a zoom outlives all other switches
    margin: { l: 48, r: 12, t: touch ? 34 : 8, b: 36 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: lines.gridcolor, activecolor: panel.color },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: panel.fontFamily, size: 12, color: panel.color },
    legend: { orientation: "h", traceorder: "normal", y: 1, yanchor: "bottom", x: 0 },
    ...figure.layout,
    // standoff: from the lowest value of y, which may be beside the first of x
    xaxis: {
      ...lines,
      ...(switched ? { title: { text: data.axes[axis], standoff: 6 }, ticklabelstandoff: 4 } : {}),
      ...(figure.layout.xaxis || {}),
    },
    yaxis: { ...lines, exponentformat: "e", ...(figure.layout.yaxis || {}) },
  };
  if (width) layout.width = width;
  return Plotly.react(element, traces, layout, config);
}

function drawAll(width) {
  const theme = chosen("theme");
  if (width) root.dataset.theme = "light";
  else root.dataset.theme = theme === "auto" ? "" : theme;
  return Promise.all(Object.keys(data.figures).map((id) => draw(id, width && (wide(id) ? 2 * width : width))));
}

function wide(id) {
  return document.getElementById(id).parentElement.classList.contains("wide");
}

document.querySelector("nav").addEventListener("change", () => drawAll());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());
let opened = []; // by printing, which closes them again
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  opened.forEach((each) => (each.open = true));
  drawAll(printWidth);
});
addEventListener("afterprint", () => {
  opened.forEach((each) => (each.open = false));
  drawAll();
});
drawAll().then(() => (root.dataset.drawn = "true"));
