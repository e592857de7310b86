// Where each partition is drawn: a forest, each tree from left to right, the trees packed in
// columns. Pure functions of partitions and width.

const TIERS = [
  { name: "card", upTo: 40, w: 168, h: 48, gx: 76, gy: 14, gap: 28, rows: 60 },
  { name: "chip", upTo: 400, w: 46, h: 20, gx: 26, gy: 6, gap: 16, rows: 60 },
  { name: "dot", upTo: Infinity, w: 10, h: 10, gx: 14, gy: 4, gap: 9, rows: 80 },
];
const MARGIN = 6;

/** The partition that this one is drawn behind, and by which kind of edge; null for a root. */
export function parentOf(partition, known) {
  if (partition.starts_after !== undefined && known.has(partition.starts_after))
    return { id: partition.starts_after, kind: "after" };
  const from = (partition.cursor_from || []).find((id) => known.has(id));
  return from === undefined ? null : { id: from, kind: "cursor" };
}

/** Whether two statuses are drawn at the same places. */
export function shape(partitions) {
  return partitions
    .map((p) => `${p.id}:${p.starts_after ?? ""}:${(p.cursor_from || []).join("+")}`)
    .join(" ");
}

/** {tier, nodes: Map(id -> {x, y, w, h}), edges: [{from, to, kind}], width, height} */
export function layout(partitions, width) {
  const tier = TIERS.find((each) => partitions.length <= each.upTo);
  const known = new Set(partitions.map((p) => p.id));
  const children = new Map();
  const roots = [];
  const edges = [];
  for (const partition of partitions) {
    const parent = parentOf(partition, known);
    if (parent === null) roots.push(partition.id);
    else {
      edges.push({ from: parent.id, to: partition.id, kind: parent.kind });
      if (!children.has(parent.id)) children.set(parent.id, []);
      children.get(parent.id).push(partition.id);
    }
  }
  const room = width - 2 * MARGIN;
  const blocks = roots.map((root) => place(root, children, tier, room));
  return { tier: tier.name, edges, ...pack(blocks, tier, room) };
}

/** The places of one tree, from its own upper left corner. */
function place(root, children, tier, room) {
  const order = [];
  const pending = [[root, 0]];
  while (pending.length) {
    const [id, depth] = pending.pop();
    order.push([id, depth]);
    const below = children.get(id) || [];
    for (let i = below.length - 1; i >= 0; i--) pending.push([below[i], depth + 1]);
  }
  const leaves = order.filter(([id]) => !children.has(id)).length;
  const block = leaves > tier.rows ? inGenerations(order, tier) : asTree(order, children, tier);
  return block.w > room && tier.name !== "dot" ? indented(order, tier, room) : block;
}

/** A tree that is too wide: one below the other, like folders. */
function indented(order, tier, room) {
  const deepest = Math.max(...order.map(([, depth]) => depth));
  const step = Math.min(24, Math.max(0, room - tier.w) / deepest);
  const nodes = order.map(([id, depth], i) => [id, depth * step, i * (tier.h + tier.gy)]);
  return { ...sized(nodes, tier), step };
}

function asTree(order, children, tier) {
  const rows = new Map();
  let leaf = 0;
  for (let i = order.length - 1; i >= 0; i--) {
    const [id] = order[i];
    const below = children.get(id);
    if (!below) rows.set(id, leaf++);
    else rows.set(id, (rows.get(below[0]) + rows.get(below[below.length - 1])) / 2);
  }
  const last = leaf - 1; // leaves were counted from below
  const nodes = order.map(([id, depth]) => [id, depth * (tier.w + tier.gx), (last - rows.get(id)) * (tier.h + tier.gy)]);
  return sized(nodes, tier);
}

/** A tree that is too high: each generation is a grid. */
function inGenerations(order, tier) {
  const generations = [];
  for (const [id, depth] of order) (generations[depth] ||= []).push(id);
  const nodes = [];
  let x = 0;
  for (const generation of generations) {
    const rows = Math.min(generation.length, tier.rows);
    const top = ((tier.rows - rows) / 2) * (tier.h + tier.gy);
    generation.forEach((id, i) => {
      const column = Math.floor(i / tier.rows);
      nodes.push([id, x + column * (tier.w + tier.gy), top + (i % tier.rows) * (tier.h + tier.gy)]);
    });
    x += Math.ceil(generation.length / tier.rows) * (tier.w + tier.gy) + tier.gx * 3;
  }
  return sized(nodes, tier);
}

function sized(nodes, tier) {
  const w = Math.max(...nodes.map(([, x]) => x)) + tier.w;
  const h = Math.max(...nodes.map(([, , y]) => y)) + tier.h;
  return { nodes, w, h };
}

/** Put the trees into columns as low as they fit into the width, or one above the other. */
function pack(blocks, tier, width) {
  let height = Math.max(0, ...blocks.map((block) => block.h));
  const total = blocks.reduce((sum, block) => sum + block.h + tier.gy, 0);
  let columns = inColumns(blocks, height, tier);
  while (columns.width > width && height < total) {
    height *= 1.06;
    columns = inColumns(blocks, height, tier);
  }
  const nodes = new Map();
  for (const { block, x, y } of columns.placed)
    for (const [id, dx, dy] of block.nodes)
      nodes.set(id, { x: MARGIN + x + dx, y: MARGIN + y + dy, w: tier.w, h: tier.h, step: block.step });
  return { nodes, width: columns.width + 2 * MARGIN, height: columns.height + 2 * MARGIN };
}

function inColumns(blocks, height, tier) {
  const placed = [];
  let [x, y, widest, used] = [0, 0, 0, 0];
  for (const block of blocks) {
    if (y > 0 && y + block.h > height + 0.5) {
      x += widest + tier.gap;
      y = widest = 0;
    }
    placed.push({ block, x, y });
    widest = Math.max(widest, block.w);
    used = Math.max(used, y + block.h);
    y += block.h + tier.gy;
  }
  return { placed, width: x + widest, height: used };
}
