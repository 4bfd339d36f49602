// The fleet at a glance: one cell for each device, nodes as blocks. Only the rows in view are drawn, so ten thousand
// nodes scroll like sixteen. Keys: arrows move, Home and End jump, Enter opens.

import { h } from "./dom.js";
import { riskText } from "./format.js";

const SIZES = [
  { most: 700, cell: 20, gap: 3, label: 16, space: 16 },
  { most: 6000, cell: 11, gap: 2, label: 0, space: 9 },
  { most: Infinity, cell: 7, gap: 1, label: 0, space: 5 },
];
const NARROW_PX = 480;
const NARROW_SIZE = { cell: 17, gap: 2, label: 16, space: 14 };
const MOST_COLUMNS = 8;
const PADDING = 16;

const byName = new Intl.Collator("en", { numeric: true });

export class Heatmap {
  constructor(onPick) {
    this.onPick = onPick;
    this.nodes = [];
    this.cells = [];
    this.current = -1;
    this.canvas = h("canvas", {});
    this.ghost = h("div", { class: "ghost" });
    this.box = h("div", { class: "heat", tabindex: "0", role: "application", "aria-roledescription": "heat map", "aria-label": "Risk of every device. Arrow keys move, Enter opens the device." }, this.canvas, this.ghost);
    this.info = h("div", { class: "heat-info", "aria-live": "polite" }, "Point at a cell, or use the arrow keys.");
    this.box.addEventListener("scroll", () => this.draw(), { passive: true });
    this.box.addEventListener("mousemove", (event) => this.point(this.hit(event)));
    this.box.addEventListener("click", (event) => this.open(this.hit(event)));
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.observer = new ResizeObserver(() => this.layout());
    this.observer.observe(this.box);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.onScheme = () => this.draw();
    this.scheme.addEventListener("change", this.onScheme);
  }

  close() {
    this.observer.disconnect();
    this.scheme.removeEventListener("change", this.onScheme);
  }

  show(items) {
    const groups = new Map();
    const equipped = new Set(items.filter((item) => item.kind !== "node").map((item) => item.node));
    for (const item of items) {
      // A host that is well is not a cell of its own beside its devices.
      if (item.kind === "node" && item.level === "healthy" && equipped.has(item.node)) continue;
      if (!groups.has(item.node)) groups.set(item.node, []);
      groups.get(item.node).push(item);
    }
    const order = (item) => (item.kind === "gpu" ? 0 : item.kind === "node" ? 2 : 1);
    this.nodes = [...groups.keys()].sort(byName.compare).map((name) => ({
      name,
      simulated: groups.get(name)[0].simulated,
      items: groups.get(name).sort((a, b) => order(a) - order(b) || byName.compare(a.device, b.device)),
    }));
    const chosen = this.cells[this.current];
    this.cells = this.nodes.flatMap((node, at) => node.items.map((item, within) => ({ item, at, within })));
    this.current = chosen ? this.cells.findIndex((cell) => cell.item.device === chosen.item.device) : -1;
    this.layout();
    if (this.current >= 0) this.describe();
  }

  layout() {
    const width = this.box.clientWidth;
    if (!width || !this.nodes.length) return;
    this.size = SIZES.find((size) => this.cells.length <= size.most);
    if (this.size.label && width < NARROW_PX) this.size = NARROW_SIZE;
    const { cell, gap, label, space } = this.size;
    const most = this.nodes.reduce((found, node) => Math.max(found, node.items.length), 1);
    const pitch = cell + gap;
    const room = Math.max(1, Math.floor((width - 2 * PADDING + gap) / pitch));
    this.columns = Math.min(MOST_COLUMNS, most, room);
    this.blockWidth = Math.max(this.columns * pitch - gap, label ? 84 : 0) + space;
    this.blockHeight = label + Math.ceil(most / this.columns) * pitch - gap + space;
    this.perRow = Math.max(1, Math.floor((width - 2 * PADDING + space) / this.blockWidth));
    this.rows = Math.ceil(this.nodes.length / this.perRow);
    const height = this.rows * this.blockHeight - space + 2 * PADDING;
    this.ghost.style.setProperty("height", `${height}px`);
    const limit = Number.parseFloat(getComputedStyle(this.box).maxHeight) || height;
    this.view = Math.min(height, limit);
    this.box.style.setProperty("height", `${this.view}px`);
    const scale = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(this.view * scale);
    this.canvas.style.setProperty("width", `${width}px`);
    this.canvas.style.setProperty("height", `${this.view}px`);
    this.width = width;
    this.draw();
  }

  draw() {
    if (!this.size) return;
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paint());
  }

  place(at, within) {
    const { cell, gap, label } = this.size;
    return {
      x: PADDING + (at % this.perRow) * this.blockWidth + (within % this.columns) * (cell + gap),
      y: PADDING + Math.floor(at / this.perRow) * this.blockHeight + label + Math.floor(within / this.columns) * (cell + gap),
    };
  }

  paint() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const fills = { healthy: colour("--heat-0"), watch: colour("--heat-1"), warning: colour("--heat-2"), critical: colour("--heat-3") };
    const [ink, muted, hollow, surface] = ["--ink", "--muted", "--heat-none", "--surface"].map(colour);
    const marks = [];
    const scale = window.devicePixelRatio || 1;
    const context = this.canvas.getContext("2d");
    const { cell, label } = this.size;
    const top = this.box.scrollTop;
    context.setTransform(scale, 0, 0, scale, 0, -top * scale);
    context.clearRect(0, top, this.width, this.view);
    const first = Math.max(0, Math.floor((top - PADDING) / this.blockHeight));
    const last = Math.min(this.rows - 1, Math.floor((top + this.view - PADDING) / this.blockHeight));
    context.font = "11.5px system-ui, 'DejaVu Sans', sans-serif";
    context.textBaseline = "top";
    const round = cell > 9 ? 4 : 0;
    // One path for each colour: a path for each cell is what makes large fleets stutter.
    const paths = new Map();
    const pathOf = (kind) => {
      if (!paths.has(kind)) paths.set(kind, new Path2D());
      return paths.get(kind);
    };
    for (let at = first * this.perRow; at < Math.min(this.nodes.length, (last + 1) * this.perRow); at += 1) {
      const node = this.nodes[at];
      if (label) {
        const { x, y } = this.place(at, 0);
        context.fillStyle = muted;
        context.fillText(clip(context, node.simulated ? `${node.name} · simulated` : node.name, this.blockWidth - 10), x, y - label);
      }
      node.items.forEach((item, within) => {
        const { x, y } = this.place(at, within);
        if (item.max_risk === null || item.max_risk === undefined) pathOf("none").rect(x + 0.75, y + 0.75, cell - 1.5, cell - 1.5);
        else if (round) pathOf(item.level).roundRect(x, y, cell, cell, round);
        else pathOf(item.level).rect(x, y, cell, cell);
        // Not by colour alone: a critical cell has a mark.
        if (item.level === "critical" && cell > 9) marks.push([x + cell / 2, y + cell / 2]);
      });
    }
    for (const [kind, cells] of paths) {
      context.lineWidth = 1.5;
      context.strokeStyle = hollow;
      context.fillStyle = fills[kind] || fills.healthy;
      if (kind === "none") context.stroke(cells);
      else context.fill(cells);
    }
    context.fillStyle = surface;
    for (const [x, y] of marks) {
      context.beginPath();
      context.arc(x, y, cell / 6, 0, 7);
      context.fill();
    }
    const chosen = this.cells[this.current];
    if (chosen) {
      const { x, y } = this.place(chosen.at, chosen.within);
      context.beginPath();
      context.roundRect(x - 2, y - 2, cell + 4, cell + 4, round + 2);
      context.strokeStyle = ink;
      context.lineWidth = 2;
      context.stroke();
    }
  }

  hit(event) {
    if (!this.size) return -1;
    const box = this.box.getBoundingClientRect();
    const { cell, gap, label } = this.size;
    const x = event.clientX - box.left - PADDING;
    const y = event.clientY - box.top + this.box.scrollTop - PADDING;
    const column = Math.floor(x / this.blockWidth);
    const row = Math.floor(y / this.blockHeight);
    const at = row * this.perRow + column;
    const node = this.nodes[at];
    if (!node || x < 0 || column >= this.perRow) return -1;
    const inX = Math.floor((x - column * this.blockWidth) / (cell + gap));
    const inY = Math.floor((y - row * this.blockHeight - label) / (cell + gap));
    const within = inY * this.columns + inX;
    if (inX >= this.columns || inY < 0 || within >= node.items.length) return -1;
    return this.index(at, within);
  }

  index(at, within) {
    if (!this.nodes[at]) return -1;
    if (!this.starts || this.startsOf !== this.nodes) {
      this.starts = [];
      this.nodes.reduce((sum, node) => (this.starts.push(sum), sum + node.items.length), 0);
      this.startsOf = this.nodes;
    }
    return this.starts[at] + Math.min(within, this.nodes[at].items.length - 1);
  }

  point(index) {
    if (index === this.current) return;
    this.current = index;
    this.box.style.setProperty("cursor", index >= 0 ? "pointer" : "default");
    this.describe();
    this.draw();
  }

  describe() {
    const chosen = this.cells[this.current];
    if (!chosen) return;
    const { item } = chosen;
    const risk = item.max_risk === null || item.max_risk === undefined ? "no risk known" : `${riskText(item)}, ${item.level}`;
    this.info.textContent = [item.device, item.model, risk, item.simulated ? "simulated" : "", item.reason || ""].filter(Boolean).join(" · ");
  }

  open(index) {
    if (index >= 0) this.onPick(this.cells[index].item.device);
  }

  key(event) {
    const chosen = this.cells[Math.max(0, this.current)];
    if (!chosen) return;
    const moves = {
      ArrowRight: () => Math.min(this.cells.length - 1, this.current + 1),
      ArrowLeft: () => Math.max(0, this.current - 1),
      ArrowDown: () => this.vertical(chosen, 1),
      ArrowUp: () => this.vertical(chosen, -1),
      Home: () => 0,
      End: () => this.cells.length - 1,
    };
    if (event.key === "Enter") this.open(this.current);
    else if (moves[event.key]) {
      this.point(moves[event.key]());
      this.reveal();
    } else return;
    event.preventDefault();
  }

  vertical(chosen, direction) {
    const within = chosen.within + direction * this.columns;
    if (within >= 0 && within < this.nodes[chosen.at].items.length) return this.index(chosen.at, within);
    const next = this.index(chosen.at + direction * this.perRow, chosen.within);
    return next >= 0 ? next : this.current;
  }

  reveal() {
    const { y } = this.place(this.cells[this.current].at, 0);
    if (y - this.size.label < this.box.scrollTop) this.box.scrollTop = y - this.size.label - PADDING;
    else if (y + this.blockHeight > this.box.scrollTop + this.view) this.box.scrollTop = y + this.blockHeight - this.view;
  }
}

function clip(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && context.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

export function legend() {
  const key = (level, text) => h("span", {}, h("i", { class: "key", "data-level": level }), text);
  return h("div", { class: "legend" }, key("healthy", "healthy"), key("watch", "watch"), key("warning", "warning"), key("critical", "critical (marked)"), key("none", "no risk known"));
}

