"use strict";

const format = (value) =>
  value === 0 || (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6)
    ? String(Number(value.toPrecision(6)))
    : value.toExponential(3);

const escapeText = (text) => {
  const node = document.createElement("span");
  node.textContent = text;
  return node.innerHTML;
};

// The point of a series, sorted by step, that lies nearest to `step`.
function nearest(points, step) {
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < step) low = middle;
    else high = middle;
  }
  return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
}

function place([low, high], value, log) {
  return log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
}

function putReadout(readout, html, share) {
  readout.innerHTML = html;
  readout.style.display = "block";
  const left = share < 0.5;
  readout.style.left = left ? `calc(${share * 100}% + 12px)` : "auto";
  readout.style.right = left ? "auto" : `calc(${(1 - share) * 100}% + 12px)`;
}

function follow(area, move, leave) {
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const x = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const y = Math.min(1, Math.max(0, (event.clientY - box.top) / box.height));
    move(x, y);
  });
  area.addEventListener("pointerleave", leave);
}

const MOST_ROWS = 8;

function liveChart(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  const cursor = plot.querySelector(".cursor");
  const readout = plot.querySelector(".readout");
  const clear = () => {
    cursor.style.display = readout.style.display = "none";
    plot.querySelectorAll(".dot").forEach((dot) => dot.remove());
  };
  follow(plot, (x, y) => {
    clear();
    const scale = figure.dataset.scale;
    const pointed = data.x[0] + x * (data.x[1] - data.x[0]);
    const visible = (series) =>
      series.run === null || !document.querySelector(`button.run[data-run="${series.run}"][aria-pressed="false"]`);
    let rows = data.series.filter(visible).map((series) => {
      const [step, value] = nearest(series.points, pointed);
      return { ...series, step, value, up: place(data.y[scale], value, scale === "log") };
    });
    if (!rows.length) return;
    const distance = (row) => Math.abs(row.step - pointed);
    const step = rows.reduce((best, row) => (distance(row) < distance(best) ? row : best)).step;
    if (rows.length > MOST_ROWS) {
      rows.sort((a, b) => Math.abs(1 - a.up - y) - Math.abs(1 - b.up - y));
      rows = rows.slice(0, 5).sort((a, b) => b.value - a.value);
    }
    const share = place(data.x, step, false);
    cursor.style.display = "block";
    cursor.style.left = `${share * 100}%`;
    for (const row of rows) {
      const dot = document.createElement("div");
      dot.className = "dot";
      dot.style.left = `${place(data.x, row.step, false) * 100}%`;
      dot.style.top = `${(1 - row.up) * 100}%`;
      dot.style.background = row.colour;
      plot.append(dot);
    }
    const lines = rows.map((row) => {
      const when = row.step === step ? "" : ` at ${row.step.toLocaleString("en")}`;
      return `<i style="background:${row.colour}"></i>${escapeText(row.name)}${when}<b>${format(row.value)}</b>`;
    });
    putReadout(readout, [`step ${step.toLocaleString("en")}`, ...lines].join("<br>"), share);
  }, clear);
  for (const button of figure.querySelectorAll("button.scale")) {
    button.addEventListener("click", () => {
      figure.dataset.scale = button.dataset.to;
      for (const other of figure.querySelectorAll("button.scale")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
    });
  }
}

function liveHeat(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const cells = figure.querySelector(".cells");
  const readout = cells.querySelector(".readout");
  follow(cells, (x, y) => {
    const column = Math.min(data.steps.length - 1, Math.floor(x * data.steps.length));
    const row = Math.min(data.names.length - 1, Math.floor(y * data.names.length));
    const value = data.rows[row][column];
    const text = value === null ? "none" : format(value);
    const where = `step ${data.steps[column].toLocaleString("en")}<br>${escapeText(data.names[row])}`;
    putReadout(readout, `${where}<b>${text}</b>`, x);
  }, () => { readout.style.display = "none"; });
}

document.querySelectorAll("figure.heat").forEach(liveHeat);
document.querySelectorAll("figure[data-scale]").forEach(liveChart);
