// Polls /status and shows it. Texts from elsewhere are only ever set as text, never as markup.

import { Drawing, summary } from "./drawing.js";
import { bytes, className, clean, count, rate, seconds } from "./format.js";

const INTERVAL = 2000;
const SAMPLES = 90;
const ROWS = 50;
const ALONE = 3; // problems of one name that are listed one by one
const STUCK = ["handler-stuck", "store-stuck", "fetch-stuck", "discovery-stuck", "stalled", "event-loop-blocked", "failed", "parked"];
const ORDER = ["parked", "retrying", "vanished", "paused", "waiting", "reading", "caught up", "elsewhere", "drained", "superseded"];
const $ = (id) => document.getElementById(id);

const page = { consumer: 0, chosen: null, state: null, rows: ROWS, filter: "", status: null, received: 0, failedSince: null };
const histories = new Map();
const drawing = new Drawing($("drawing"), { hover: showTip, choose });

function make(tag, text, cls) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = clean(text);
  if (cls) made.className = cls;
  return made;
}

function age(time, now) {
  return time === undefined || time === null ? undefined : Math.max(0, (Date.parse(now) - Date.parse(time)) / 1000);
}

// ------------------------------------------------------------------ rates

function history(consumer) {
  const key = `${consumer.name} ${consumer.feed}`;
  if (!histories.has(key)) histories.set(key, { samples: [], before: new Map(), rates: new Map() });
  return histories.get(key);
}

function record(consumer) {
  const known = history(consumer);
  const at = Date.parse(consumer.time) / 1000;
  if (known.at !== undefined && at - known.at < 0.2) return;
  const passed = at - known.at;
  for (const p of consumer.partitions) {
    const events = p.events || 0;
    const before = known.before.get(p.id);
    if (before !== undefined && passed > 0) known.rates.set(p.id, Math.max(0, events - before) / passed);
    known.before.set(p.id, events);
  }
  if (known.at !== undefined) known.samples.push([...known.rates.values()].reduce((sum, each) => sum + each, 0));
  if (known.samples.length > SAMPLES) known.samples.shift();
  known.at = at;
}

// ------------------------------------------------------------------ what is shown

function render() {
  const { status } = page;
  const consumer = status.consumers[page.consumer] || status.consumers[0];
  if (!consumer) return showHealth({ live: !status.blocked, ready: false, problems: [] }, status);
  const known = history(consumer);
  const problems = [...(status.blocked ? [status.blocked] : []), ...consumer.health.problems];
  const troubled = new Set(problems.filter((p) => STUCK.includes(p.name)).map((p) => p.partition));
  const view = { rates: known.rates, troubled, chosen: page.chosen, away: (p) => page.state !== null && p.state !== page.state };
  showHeader(consumer, status);
  showHealth(consumer.health, status);
  showProblems(problems, consumer.time);
  showFigures(consumer, known);
  showStates(consumer);
  drawing.update(consumer.partitions, view);
  showRows(consumer, view, problems);
  showQuarantine(consumer);
  showOwners(consumer);
  showReports(consumer);
}

function showHeader(consumer, status) {
  document.title = clean(`${consumer.name} · feedapi monitor`);
  $("feed").textContent = clean(consumer.feed);
  $("subtitle").textContent = clean([`consumer ${consumer.name}`, consumer.dialect, `${consumer.partitions.length} partitions`,
    `${status.process.host} (${status.process.pid})`, `up ${seconds(age(status.process.started, status.time))}`].filter(Boolean).join(" · "));
  const nav = $("consumers");
  nav.hidden = status.consumers.length < 2;
  nav.replaceChildren(...status.consumers.map((each, i) => {
    const button = make("button", each.name);
    button.title = clean(each.feed);
    button.setAttribute("aria-pressed", String(i === page.consumer));
    button.addEventListener("click", () => Object.assign(page, { consumer: i, chosen: null, state: null }) && render());
    return button;
  }));
}

function showHealth(health, status) {
  const [cls, text] = status.blocked ? ["bad", "event loop blocked"] : !health.live ? ["bad", "not live"]
    : !health.ready ? ["warn", "live, not ready"] : health.problems.length ? ["warn", "ready, with problems"] : ["good", "live and ready"];
  $("health").className = `pill ${cls}`;
  $("health").textContent = text;
}

/** Problems of one name together when there are many: [name, partitions, text, since]. */
function grouped(problems) {
  const names = new Map();
  for (const problem of problems) {
    if (!names.has(problem.name)) names.set(problem.name, []);
    names.get(problem.name).push(problem);
  }
  return [...names.values()].flatMap((all) => (all.length <= ALONE ? all.map((each) => [each]) : [all]));
}

function showProblems(problems, now) {
  $("problems").hidden = !problems.length;
  $("problems").replaceChildren(...grouped(problems).map((all) => {
    const row = make("div", undefined, STUCK.includes(all[0].name) ? "problem" : "problem mild");
    const ids = all.map((each) => each.partition).filter((id) => id !== null);
    const where = !ids.length ? "" : ids.length === 1 ? `partition ${ids[0]}` : `${ids.length} partitions`;
    const others = ids.length > 1 ? `${ids.slice(0, 6).join(", ")}${ids.length > 6 ? " …" : ""}: ` : "";
    row.append(make("b", all[0].name), make("span", where, "where"),
      make("span", others + all[0].text.replace(/^feed \S+?(, partition \d+)?: /, ""), "text"), make("time", seconds(age(all[0].since, now))));
    return row;
  }));
}

function largest(partitions, value) {
  return partitions.reduce((best, p) => (value(p) !== undefined && (!best || value(p) > value(best)) ? p : best), null);
}

function showFigures(consumer, known) {
  const live = consumer.partitions.filter((p) => !["drained", "superseded", "elsewhere"].includes(p.state));
  const behind = largest(live.filter((p) => !p.caught_up), (p) => p.behind_seconds);
  const held = largest(live, (p) => p.in_flight_seconds);
  const failing = live.filter((p) => ["retrying", "parked"].includes(p.state));
  const caughtUp = live.filter((p) => p.caught_up).length;
  const quarantined = consumer.partitions.reduce((sum, p) => sum + (p.quarantined || 0), 0);
  const kept = consumer.quarantine ? consumer.quarantine.events.length : null;
  figure("rate", known.samples.length ? rate(known.samples.at(-1)) : "–");
  spark(known.samples);
  figure("caught-up", live.length ? `${Math.floor((100 * caughtUp) / live.length)} %` : "–", `${caughtUp} of ${live.length} open`);
  figure("behind", behind ? seconds(behind.behind_seconds) : "–", behind ? `partition ${behind.id}` : live.length > caughtUp ? `${live.length - caughtUp} not caught up so far` : live.length ? "nobody" : "not known yet", behind && behind.behind_seconds > 60 ? "warn" : "");
  figure("in-flight", held ? seconds(held.in_flight_seconds) : "–", held ? `partition ${held.id}` : "no batch", held && held.in_flight_seconds > 60 ? "bad" : "");
  figure("failing", String(failing.length), failing.length ? `partition ${failing.slice(0, 3).map((p) => p.id).join(", ")}` : "", failing.length ? "bad" : "");
  figure("quarantined", kept === null ? String(quarantined) : `${kept}${consumer.quarantine.more ? "+" : ""}`, `${quarantined} since the start`, kept || quarantined ? "warn" : "");
  figure("buffered", bytes(consumer.buffered_bytes), `${count(consumer.events)} events so far`, "", "events-total");
}

function figure(id, text, below = "", cls = "", belowId = `${id}-of`) {
  $(id).textContent = text;
  $(id).className = cls;
  if ($(belowId)) $(belowId).textContent = below;
}

function spark(samples) {
  const [area, line] = $("spark").children;
  if (samples.length < 2) return;
  const top = Math.max(...samples, 1);
  const room = Math.max(samples.length, SAMPLES / 6);
  const x = (i) => ((240 * (i + room - samples.length)) / (room - 1)).toFixed(1);
  const points = samples.map((value, i) => `${x(i)} ${(42 - (38 * value) / top).toFixed(1)}`);
  line.setAttribute("d", `M${points.join("L")}`);
  area.setAttribute("d", `M${x(0)} 44L${points.join("L")}L240 44Z`);
}

function showStates(consumer) {
  const states = ORDER.filter((state) => consumer.states[state]).concat(Object.keys(consumer.states).filter((state) => !ORDER.includes(state)));
  $("states").replaceChildren(...states.map((state) => {
    const button = make("button", undefined, className(state));
    button.append(make("i"), make("b", count(consumer.states[state])), document.createTextNode(clean(state)));
    button.setAttribute("aria-pressed", String(page.state === state));
    button.addEventListener("click", () => { page.state = page.state === state ? null : state; render(); });
    return button;
  }));
  $("bar").replaceChildren(...states.map((state) => {
    const part = make("i", undefined, className(state));
    part.style.flexGrow = consumer.states[state];
    return part;
  }));
}

// ------------------------------------------------------------------ the table

function showRows(consumer, view, problems) {
  const worst = new Map(problems.filter((p) => p.partition !== null).map((p) => [p.partition, STUCK.includes(p.name) ? 0 : 1]));
  const rank = (p) => (p.id === page.chosen ? -1 : (worst.get(p.id) ?? (p.in_flight_seconds > 5 ? 2 : 3 + ORDER.indexOf(p.state))));
  const found = consumer.partitions.filter(matches);
  found.sort((a, b) => rank(a) - rank(b) || (b.behind_seconds || 0) - (a.behind_seconds || 0) || a.id - b.id);
  $("table").classList.toggle("alone", !Object.keys(consumer.owners).length);
  $("rows").replaceChildren(...found.slice(0, page.rows).map((p) => row(p, view, consumer.time)));
  $("more").hidden = found.length <= page.rows;
  $("more").textContent = `Show more (${found.length - page.rows} left)`;
}

function matches(p) {
  if (page.state !== null && p.state !== page.state) return false;
  if (!page.filter) return true;
  return String(p.id) === page.filter || `${p.state} ${p.owner || ""} ${p.error || ""} ${p.wait || ""}`.toLowerCase().includes(page.filter);
}

function row(p, view, now) {
  const made = make("tr", undefined, p.id === page.chosen ? "chosen" : "");
  const state = make("span", undefined, `state ${className(p.state)}`);
  state.append(make("i"), document.createTextNode(clean(p.state)));
  const first = make("td");
  first.append(state);
  const failures = (p.handler_failures || 0) + (p.fetch_failures || 0);
  const waits = p.waits_for ? `partition ${p.waits_for.slice(0, 4).join(", ")}` : [p.wait, p.evidence_seconds && seconds(p.evidence_seconds)].filter(Boolean).join(", ");
  made.append(make("td", p.id, "n"), first, make("td", waits), make("td", rate(view.rates.get(p.id)), "n"),
    make("td", count(p.events || 0), "n"),
    make("td", p.caught_up ? "caught up" : seconds(p.behind_seconds), "n"),
    make("td", seconds(p.in_flight_seconds), p.in_flight_seconds > 60 ? "n bad" : "n"), make("td", p.attempts ?? "", p.attempts > 1 ? "n bad" : "n"),
    make("td", failures || "", "n"), make("td", seconds(age(p.committed_at, now)), "n"), make("td", p.owner ?? "", "owned"),
    make("td", (p.error ?? "").replace(/^feed \S+?(, partition \d+)?: /, ""), "text"));
  made.addEventListener("click", () => choose(p.id));
  return made;
}

function showQuarantine(consumer) {
  const events = consumer.quarantine ? consumer.quarantine.events : [];
  $("quarantine").hidden = !events.length;
  $("quarantine-rows").replaceChildren(...events.map((event) => {
    const made = make("tr");
    made.append(make("td", event.id), make("td", event.partition, "n"), make("td", event.error_type), make("td", seconds(age(event.time, consumer.time))));
    return made;
  }));
}

function showOwners(consumer) {
  const owners = Object.entries(consumer.owners).sort(([a], [b]) => (a < b ? -1 : 1));
  const most = Math.max(1, ...owners.map(([, n]) => n));
  $("owners").hidden = !owners.length;
  $("owner-rows").replaceChildren(...owners.map(([owner, n]) => {
    const made = make("div", undefined, "owner");
    const bar = make("progress");
    Object.assign(bar, { max: most, value: n });
    made.append(make("span", owner), bar, make("b", `${n} partitions`));
    return made;
  }));
}

function showReports(consumer) {
  $("reports").hidden = !consumer.reports.length;
  $("report-rows").replaceChildren(...consumer.reports.slice(-30).reverse().map((text) => make("li", text)));
}

// ------------------------------------------------------------------ what a person does

function choose(id) {
  page.chosen = page.chosen === id ? null : id;
  render();
}

function showTip(id, event) {
  const tip = $("tip");
  const consumer = page.status && page.status.consumers[page.consumer];
  const p = id === null || !consumer ? null : consumer.partitions.find((each) => each.id === id);
  tip.hidden = !p;
  if (!p) return;
  tip.textContent = clean(`partition ${p.id}: ${summary(p)}`) + [
    ["starts after", p.starts_after], ["cursor of", p.cursor_from && p.cursor_from.join(", ")], ["cursor", p.cursor && p.cursor.slice(0, 60)],
    ["events", p.events], ["behind", p.caught_up ? "caught up" : p.behind_seconds === undefined ? undefined : seconds(p.behind_seconds)],
    ["owner", p.owner], ["error", p.error],
  ].filter(([, value]) => value !== undefined).map(([name, value]) => `\n${name}: ${clean(value)}`).join("");
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - box.width - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - box.height - 8)}px`;
}

$("filter").addEventListener("input", () => Object.assign(page, { filter: $("filter").value.trim().toLowerCase(), rows: ROWS }) && page.status && render());
$("more").addEventListener("click", () => { page.rows += 200; render(); });
addEventListener("resize", () => page.status && render());

// ------------------------------------------------------------------ polling

async function poll() {
  const began = performance.now();
  try {
    const response = await fetch("status", { cache: "no-store", signal: AbortSignal.timeout(15000) });
    if (!response.ok) throw new Error(`status ${response.status}`);
    page.status = await response.json();
    page.received = Date.now();
    page.failedSince = null;
    page.status.consumers.forEach(record);
    render();
  } catch (error) {
    page.failedSince ??= Date.now();
    console.warn("feedapi monitor:", error);
  }
  tick();
  // A large feed takes a while: leave the process most of the time to consume.
  setTimeout(document.hidden ? resume : poll, Math.max(INTERVAL, 10 * (performance.now() - began)));
}

function resume() {
  if (!document.hidden) poll();
  else document.addEventListener("visibilitychange", resume, { once: true });
}

function tick() {
  const silent = page.received ? (Date.now() - page.received) / 1000 : 0;
  $("updated").textContent = page.received ? (silent < 3 ? "live" : `${seconds(silent)} ago`) : "";
  $("offline").hidden = page.failedSince === null;
  $("offline").textContent = page.failedSince === null ? "" : `No answer from the process since ${seconds((Date.now() - page.failedSince) / 1000)}. What is shown is from before.`;
}

setInterval(tick, 1000);
poll();
