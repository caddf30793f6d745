// Draws the charts: lines over time from data attributes, as SVG, with a cross that names the values under the pointer.
(function () {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 190, LEFT = 52, RIGHT = 6, TOP = 8, BOTTOM = 20;

  function element(name, attributes, parent, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  function words(value, unit) {
    if (value === null) return "–";
    if (unit === "s") {
      if (value === 0) return "0";
      if (value < 1) return `${Math.round(value * 1000)} ms`;
      return value < 100 ? `${Number(value.toPrecision(3))} s` : `${Math.round(value / 60)} min`;
    }
    const tail = unit === "B/s" ? " B" : "";
    for (const [limit, name] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (value >= limit) return `${Number((value / limit).toPrecision(3))} ${name}${tail}`;
    return `${Number(value.toPrecision(3))}${tail}`;
  }

  // A round number at or above `most` that four steps divide well.
  function ceiling(most) {
    if (!(most > 0)) return 1;
    const power = 10 ** Math.floor(Math.log10(most));
    for (const factor of [1, 2, 4, 6, 8, 10]) if (factor * power >= most) return factor * power;
    return 10 * power;
  }

  function clock(at, span) {
    const moment = new Date(at * 1000);
    const two = (value) => String(value).padStart(2, "0");
    const short = `${two(moment.getHours())}:${two(moment.getMinutes())}`;
    return span ? short : `${short}:${two(moment.getSeconds())}`;
  }

  // Points to a path; nulls are joined where `join`, and break the line otherwise.
  function path(points) {
    let text = "", pen = false;
    for (const [x, y] of points) {
      if (y === null) { pen = false; continue; }
      text += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = true;
    }
    return text;
  }

  function chart(svg) {
    const series = JSON.parse(svg.dataset.series);
    const start = Number(svg.dataset.start), step = Number(svg.dataset.step);
    const count = series[0].values.length;
    const width = Math.max(300, svg.clientWidth);
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren();
    const most = ceiling(Math.max(...series.flatMap((each) => each.values.map((value) => value ?? 0))));
    const x = (place) => LEFT + (place / (count - 1)) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / most) * (HEIGHT - TOP - BOTTOM);
    for (let line = 0; line <= 4; line += 1) {
      const value = (most * line) / 4;
      element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }, svg);
      element("text", { x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, svg, words(value, series[0].unit));
    }
    const labels = Math.max(2, Math.floor(width / 110));
    for (let label = 0; label <= labels; label += 1) {
      const place = Math.round((label / labels) * (count - 1));
      const anchor = label === 0 ? "start" : label === labels ? "end" : "middle";
      element("text", { x: x(place), y: HEIGHT - 4, "text-anchor": anchor }, svg, clock(start + place * step, true));
    }
    series.forEach((each, number) => {
      const points = each.values.map((value, place) => [x(place), value === null ? null : y(value)]);
      if (svg.dataset.kind === "rate") {
        if (number === 0) element("path", { class: "area s0", d: `M${x(0)} ${y(0)}${points.map(([px, py]) => `L${px.toFixed(1)} ${py.toFixed(1)}`).join("")}L${x(count - 1)} ${y(0)}Z` }, svg);
        element("path", { class: `line s${number}`, d: path(points) }, svg);
      } else {
        element("path", { class: `line s${number}`, d: path(points) }, svg);
        points.forEach(([px, py], place) => {
          const alone = py !== null && (points[place - 1]?.[1] ?? null) === null && (points[place + 1]?.[1] ?? null) === null;
          if (alone) element("circle", { class: `mark s${number}`, cx: px, cy: py, r: 1.8 }, svg);
        });
      }
    });
    const cross = element("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }, svg);
    const caption = svg.parentElement.querySelector("figcaption");
    caption.querySelectorAll(".key").forEach((each) => each.remove());
    series.forEach((each, number) => {
      const key = document.createElement("span");
      key.className = `key s${number}`;
      key.append(document.createElement("i"), each.label);
      caption.append(key);
    });
    svg.onpointermove = (event) => {
      const box = svg.getBoundingClientRect();
      const scale = width / box.width;
      const place = Math.max(0, Math.min(count - 1, Math.round((((event.clientX - box.left) * scale - LEFT) / (width - LEFT - RIGHT)) * (count - 1))));
      cross.setAttribute("x1", x(place)); cross.setAttribute("x2", x(place)); cross.setAttribute("visibility", "visible");
      let tip = svg.parentElement.querySelector(".tip");
      if (tip === null) { tip = document.createElement("div"); tip.className = "tip"; svg.parentElement.append(tip); }
      tip.replaceChildren(clock(start + place * step, step > 60));
      for (const each of series) {
        const value = document.createElement("b");
        value.textContent = words(each.values[place], each.unit) + (each.unit.endsWith("s/s") && each.values[place] !== null ? ` ${each.unit}` : "");
        tip.append(document.createElement("br"), `${each.label}: `, value);
      }
      const left = x(place) / scale + svg.offsetLeft;
      tip.style.top = `${svg.offsetTop + 14}px`;
      tip.style.left = left > box.width * 0.6 ? "auto" : `${left + 12}px`;
      tip.style.right = left > box.width * 0.6 ? `${svg.parentElement.clientWidth - left + 12}px` : "auto";
    };
    svg.onpointerleave = () => { cross.setAttribute("visibility", "hidden"); svg.parentElement.querySelector(".tip")?.remove(); };
  }

  function spark(svg) {
    const values = JSON.parse(svg.dataset.values).map((value) => value ?? 0);
    const most = Math.max(...values);
    svg.replaceChildren();
    if (!(most > 0)) return;
    svg.setAttribute("viewBox", `0 0 ${values.length - 1} 26`);
    svg.setAttribute("preserveAspectRatio", "none");
    const points = values.map((value, place) => [place, 25 - (value / most) * 22]);
    element("path", { class: "area", d: `M0 26${points.map(([px, py]) => `L${px} ${py.toFixed(2)}`).join("")}L${values.length - 1} 26Z` }, svg);
    element("path", { d: path(points) }, svg);
  }

  function draw() {
    document.querySelectorAll(".chart svg[data-series]").forEach((each) => { if (!each.matches(":hover")) chart(each); });
    document.querySelectorAll("svg.spark").forEach(spark);
  }

  draw();
  document.addEventListener("millrace:fresh", draw);
  window.addEventListener("resize", draw);
})();
