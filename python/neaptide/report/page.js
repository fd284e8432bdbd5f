"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const config = { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "resetScale2d"]] };

  // A page from the disk may have no storage; then the choice lasts as long as the page.
  const stored = { get: () => { try { return localStorage.getItem("neaptide-theme"); } catch { return null; } },
                   set: (value) => { try { localStorage.setItem("neaptide-theme", value); } catch { /* no storage */ } } };
  const asked = new URLSearchParams(location.search).get("theme");
  const preferred = () => (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = asked || stored.get() || preferred();

  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // What the figures leave to the page: fonts, and the colours of everything that is not data.
  function themed(layout) {
    const text = colour("--text"), quiet = colour("--quiet"), line = colour("--line"), card = colour("--card");
    const out = {
      ...layout,
      autosize: true,
      template: "none",
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: quiet },
      margin: { l: 70, r: 20, t: 64, b: 55, ...layout.margin },
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1, yref: "container", yanchor: "top", traceorder: "normal",
                font: { color: text }, ...layout.legend },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: line, activecolor: quiet },
      hoverlabel: { bgcolor: card, bordercolor: line, font: { color: text, size: 13 }, align: "left" },
    };
    for (const key of Object.keys(layout)) {
      if (/^[xy]axis\d*$/.test(key)) {
        const axis = layout[key];
        out[key] = { gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, automargin: true, ...axis };
        if (axis.title) out[key].title = { standoff: 10, ...axis.title };
      }
    }
    out.annotations = (layout.annotations || []).map((note) => ({ ...note, font: { ...note.font, color: text } }));
    return out;
  }

  const shown = {};  // key → index of the view
  function draw(key) {
    const entry = figures[key];
    const view = entry.views ? entry.views[shown[key]] : null;
    const figure = view ? view.figure : entry;
    if (view) document.querySelector(`[data-notes="${key}"]`).textContent = view.notes.join(" ");
    return Plotly.react(`figure-${key}`, figure.data, themed(figure.layout), config);
  }
  const drawAll = () => Promise.all(Object.keys(figures).map(draw));

  for (const select of document.querySelectorAll("select[data-views]")) {
    const key = select.dataset.views;
    shown[key] = figures[key].first;
    select.value = String(shown[key]);
    select.addEventListener("change", () => { shown[key] = Number(select.value); draw(key); });
  }
  document.getElementById("theme").addEventListener("click", () => {
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
    stored.set(root.dataset.theme);
    drawAll();
  });
  drawAll().then(() => { root.dataset.drawn = String(Object.keys(figures).length); });
})();
