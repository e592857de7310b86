// The drawing of the partitions. Built anew when the lineage changes, else only updated.

import { className, clean, rate, seconds } from "./format.js";
import { layout, shape } from "./layout.js";

const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** What a person wants to know of a partition first. */
export function summary(p) {
  if (p.in_flight_seconds > 5) return `in flight ${seconds(p.in_flight_seconds)}`;
  if (p.state === "waiting" && p.waits_for) return `waits for ${p.waits_for.slice(0, 3).join(", ")}`;
  return p.state;
}

export class Drawing {
  constructor(svg, handlers) {
    this.svg = svg;
    this.handlers = handlers;
    this.shape = null;
    this.nodes = new Map();
  }

  update(partitions, view) {
    const width = this.svg.parentElement.clientWidth;
    const now = `${width} ${shape(partitions)}`;
    if (now !== this.shape) {
      this.shape = now;
      this.build(partitions, width);
    }
    for (const p of partitions) this.refresh(p, view);
  }

  build(partitions, width) {
    const drawn = layout(partitions, width);
    this.tier = drawn.tier;
    this.nodes.clear();
    this.svg.setAttribute("class", drawn.tier);
    this.svg.setAttribute("width", drawn.width);
    this.svg.setAttribute("height", drawn.height);
    this.svg.setAttribute("viewBox", `0 0 ${drawn.width} ${drawn.height}`);
    const edges = ["after", "cursor"].map((kind) =>
      element("path", { class: `edge ${kind}`, d: drawn.edges.filter((e) => e.kind === kind).map((e) => curve(drawn.nodes.get(e.from), drawn.nodes.get(e.to))).join("") }));
    this.svg.replaceChildren(...edges, ...partitions.map((p) => this.node(p, drawn.nodes.get(p.id))));
  }

  node(p, { x, y, w, h }) {
    const parts = { box: element("rect", { class: "box", width: w, height: h, rx: this.tier === "card" ? 10 : this.tier === "chip" ? 5 : 2.5 }) };
    const group = element("g", { transform: `translate(${x} ${y})`, "data-id": p.id }, parts.box);
    if (this.tier === "card") {
      parts.what = element("text", { class: "what", x: 18, y: 37 });
      parts.much = element("text", { class: "much", x: w - 12, y: 20 });
      group.append(element("rect", { class: "mark", x: 7, y: 9, width: 4, height: h - 18, rx: 2 }),
        element("text", { x: 18, y: 20 }, String(p.id)), parts.what, parts.much);
      group.setAttribute("tabindex", "0");
      group.setAttribute("role", "button");
    } else if (this.tier === "chip") group.append(element("text", { x: w / 2, y: 14 }, String(p.id)));
    group.addEventListener("pointerenter", (event) => this.handlers.hover(p.id, event));
    group.addEventListener("pointerleave", () => this.handlers.hover(null));
    group.addEventListener("click", () => this.handlers.choose(p.id));
    group.addEventListener("keydown", (event) => event.key === "Enter" && this.handlers.choose(p.id));
    this.nodes.set(p.id, { group, ...parts });
    return group;
  }

  refresh(p, view) {
    const node = this.nodes.get(p.id);
    const flows = view.rates.get(p.id) > 0;
    const classes = ["node", className(p.state), flows && "flowing", view.troubled.has(p.id) && "trouble",
      view.chosen === p.id && "chosen", view.away(p) && "away"].filter(Boolean).join(" ");
    if (node.classes !== classes) node.group.setAttribute("class", (node.classes = classes));
    if (!node.what) return;
    setText(node.what, clean(summary(p)));
    setText(node.much, flows ? `${rate(view.rates.get(p.id))}/s` : p.behind_seconds > 1 && p.state !== "drained" && !p.caught_up ? seconds(p.behind_seconds) : "");
    node.group.setAttribute("aria-label", clean(`partition ${p.id}: ${summary(p)}`));
  }
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function curve(a, b) {
  if (a.step !== undefined) return `M${a.x + a.step / 2} ${a.y + a.h}V${b.y + b.h / 2}H${b.x}`;
  const [x1, y1, x2, y2] = [a.x + a.w, a.y + a.h / 2, b.x, b.y + b.h / 2];
  const bend = Math.max(4, (x2 - x1) / 2);
  return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}
