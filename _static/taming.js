// The figure that the reader moves, on the page with the idea: the tamed loss and the weight
// it leaves to a label, for any alpha and number of classes. It draws itself
// into every <div class="tce-taming">; no library, no network, no kernel.
"use strict";

(() => {
  const CLASSES = [2, 3, 5, 10, 20, 50, 100, 200, 500, 1000];
  const MAX_CE = 7.5;  // both panels reach just beyond one in a thousand

  // The same formulas, in the same stable form, as tce_nb.losses.
  const weight = (ce, alpha) => (1 + ce) ** -alpha;
  const tame = (ce, alpha) => {
    if (alpha === 0) return ce;
    const log = Math.log1p(ce), beta = 1 - alpha;
    return beta === 0 ? log : Math.expm1(beta * log) / beta;
  };

  // A panel in its own coordinates; CSS scales it to the room there is.
  const WIDTH = 340, HEIGHT = 230;
  const LEFT = 38, RIGHT = 328, TOP = 28, BOTTOM = 186;
  const PANELS = [
    {name: "loss", title: "Loss", of: tame, max: 7.5, ticks: [0, 2, 4, 6]},
    {name: "weight", title: "Weight of the gradient", of: weight, max: 1.1,
     ticks: [0, 0.5, 1]},
  ];
  const xOf = ce => LEFT + (RIGHT - LEFT) * ce / MAX_CE;
  const yOf = (panel, value) => BOTTOM - (BOTTOM - TOP) * value / panel.max;

  const svg = (tag, attributes, text = "") => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const name in attributes) node.setAttribute(name, attributes[name]);
    node.textContent = text;
    return node;
  };

  const curve = (panel, alpha) => {
    const points = [];
    for (let i = 0; i <= 150; i++) {
      const ce = MAX_CE * i / 150;
      const y = yOf(panel, panel.of(ce, alpha));
      points.push(`${xOf(ce).toFixed(2)},${y.toFixed(2)}`);
    }
    return "M" + points.join("L");
  };

  const drawPanel = panel => {
    const root = svg("svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
                             "data-panel": panel.name});
    const label = svg("title", {});
    const add = (tag, attributes, text) =>
      root.appendChild(svg(tag, attributes, text));
    root.append(label);
    add("text", {class: "panel", x: LEFT, y: 16}, panel.title);
    for (const tick of panel.ticks) {
      const y = yOf(panel, tick);
      add("path", {class: "grid", d: `M${LEFT},${y}H${RIGHT}`});
      add("text", {x: LEFT - 6, y: y + 4, "text-anchor": "end"}, tick);
    }
    for (const q of [1, 0.1, 0.01, 0.001]) {
      const x = xOf(-Math.log(q));
      add("path", {class: "grid", d: `M${x},${TOP}V${BOTTOM}`});
      add("text", {x, y: BOTTOM + 16, "text-anchor": "middle"}, q);
    }
    add("text", {x: (LEFT + RIGHT) / 2, y: BOTTOM + 36,
                 "text-anchor": "middle"}, "probability of the label");
    const uniform = add("path", {class: "uniform"});
    add("path", {class: "ce", d: curve(panel, 0)});
    const tamed = add("path", {class: "tamed"});
    const ceDot = add("circle", {class: "ce", r: 5});
    const tamedDot = add("circle", {class: "tamed", r: 5});

    const move = (alpha, classes) => {
      const ce = Math.log(classes), x = xOf(ce);
      tamed.setAttribute("d", curve(panel, alpha));
      uniform.setAttribute("d", `M${x},${TOP}V${BOTTOM}`);
      for (const [dot, a] of [[ceDot, 0], [tamedDot, alpha]]) {
        dot.setAttribute("cx", x);
        dot.setAttribute("cy", yOf(panel, panel.of(ce, a)));
      }
      label.textContent = `${panel.title} against the probability of the ` +
        `label, for cross entropy and for TCE with alpha ${alpha}`;
    };
    return {root, move};
  };

  const FORM = `
    <div class="controls">
      <label>α <b data-show="alpha"></b>
        <input name="alpha" type="range" min="0" max="3" step="0.05"
               value="1.5"></label>
      <label>classes <b data-show="classes"></b>
        <input name="classes" type="range" min="0" max="${CLASSES.length - 1}"
               step="1" value="${CLASSES.indexOf(10)}"></label>
    </div>
    <div class="panels"></div>
    <table>
      <thead><tr><th>at the dots</th><th>loss</th><th>weight</th></tr></thead>
      <tbody>
        <tr><th><svg class="key"><path class="ce" d="M0,6H36"/></svg>
              CE</th>
            <td><data data-show="ce-loss"></data></td>
            <td><data data-show="ce-weight"></data></td></tr>
        <tr><th><svg class="key"><path class="tamed" d="M0,6H36"/></svg>
              TCE</th>
            <td><data data-show="tamed-loss"></data></td>
            <td><data data-show="tamed-weight"></data></td></tr>
      </tbody>
    </table>
    <p aria-live="polite">An undecided network gives each of
      <span data-show="classes"></span> classes the probability
      1/<span data-show="classes"></span>. There TCE leaves the gradient the
      weight <span class="formula">(1 + ln <span
      data-show="classes"></span>)<sup>−<span data-show="alpha"></span></sup> =
      <b data-show="tamed-weight"></b></span>.</p>`;

  const build = figure => {
    figure.innerHTML = FORM;
    const alphaInput = figure.querySelector("[name=alpha]");
    const classesInput = figure.querySelector("[name=classes]");
    const panels = PANELS.map(drawPanel);
    figure.querySelector(".panels").append(...panels.map(p => p.root));

    const show = (name, value, text) => {
      for (const node of figure.querySelectorAll(`[data-show=${name}]`)) {
        node.textContent = text;
        if (node.tagName === "DATA") node.value = value;  // all its digits
      }
    };
    const update = () => {
      const alpha = Number(alphaInput.value);
      const classes = CLASSES[classesInput.value], ce = Math.log(classes);
      for (const panel of panels) panel.move(alpha, classes);
      show("alpha", alpha, alpha.toFixed(2));
      show("classes", classes, classes);
      for (const [name, a] of [["ce", 0], ["tamed", alpha]]) {
        for (const panel of PANELS) {
          const value = panel.of(ce, a);
          show(`${name}-${panel.name}`, value, value.toFixed(3));
        }
      }
      classesInput.setAttribute("aria-valuetext", `${classes} classes`);
    };
    figure.addEventListener("input", update);
    update();
  };

  const start = () => document.querySelectorAll(".tce-taming").forEach(build);
  if (document.readyState !== "loading") start();
  else document.addEventListener("DOMContentLoaded", start);
})();
