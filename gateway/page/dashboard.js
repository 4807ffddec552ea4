/** The dashboard: asks the server four times a second, and shows what KV memory and the batch are doing. */

import { BlockMap, CACHED, FREE, IN_TRANSFER, OWNED, SHARED, sequenceColour, STATE_NAMES } from "./block_map.js";
import { StreamKV } from "./streamkv.js";
import { apiKey, bindThemeButton, setApiKey } from "./theme.js";
import { drawSpark, Timeline, WINDOW_S } from "./timeline.js";

const EVERY_MS = 250;
const AGAIN_MS = 2000;
const MAX_ROWS = 60;
const NUM_SPARK = 240;

const byId = (id) => document.getElementById(id);
const client = new StreamKV({ baseUrl: new URL(".", location.href).href, apiKey: apiKey() });
const tip = byId("tip");
const map = new BlockMap(byId("map"), showTip);
const timeline = new Timeline(byId("timeline"));

let picked = null; // the sequence that was chosen in the table
let isHeld = false;
let epoch = "";
let newestStep = -1;
let steps = []; // of the last minute
let history = []; // { timeS, hits, asked } for the hit rate of the last minute
const sparks = new Map();
let blockSize = 16;

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
const isDark = () => document.documentElement.dataset.theme === "dark";

function duration(valueS) {
  if (valueS === undefined) return "–";
  if (valueS < 0.0995) return `${number(valueS * 1000, 1)} ms`;
  return valueS < 0.9995 ? `${number(valueS * 1000)} ms` : `${number(valueS, valueS < 10 ? 2 : 1)} s`;
}

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let at = 0; at < text.length; at++) bytes[at] = text.charCodeAt(at);
  return bytes;
}

/** Little-endian int32. */
function idsOf(base64) {
  const bytes = bytesOf(base64);
  const view = new DataView(bytes.buffer);
  return Int32Array.from({ length: bytes.length / 4 }, (_, at) => view.getInt32(4 * at, true));
}

function sequenceOf([id, state, numPrompt, numTokens, numComputed, numCached, numPreemptions, table = ""]) {
  const phase = state !== "running" ? "waiting" : numComputed < numPrompt ? "prefill" : "decode";
  return { id, state, phase, numPrompt, numTokens, numComputed, numCached, numPreemptions, table: idsOf(table) };
}

const stepOf = ([step, endedS, stepS, numPrefillTokens, numPrefills, numDecodes, numPreempted = 0]) =>
  ({ step, endedS, stepS, numPrefillTokens, numPrefills, numDecodes, numPreempted });

// Tiles

const tiles = new Map(["Tokens per second", "Batch", "KV memory in use", "Prefix cache hits", "Preemptions", "First token"].map((name) => {
  const value = element("div", { className: "value" }, "–");
  const more = element("div", { className: "more" }, " ");
  const spark = element("canvas", { role: "presentation" });
  const tile = element("div", { className: "tile", role: "group", ariaLabel: name }, element("div", { className: "name" }, name), value, more, spark);
  byId("tiles").append(tile);
  return [name, { value, more, spark }];
}));

function showTile(name, value, unit, more, sparkValue) {
  const tile = tiles.get(name);
  tile.value.replaceChildren(value, ...(unit ? [element("small", {}, ` ${unit}`)] : []));
  tile.more.textContent = more;
  tile.more.title = more;
  const values = sparks.get(name) ?? [];
  values.push(sparkValue);
  if (values.length > NUM_SPARK) values.shift();
  sparks.set(name, values);
  drawSpark(tile.spark, values);
}

function showTiles(snapshot, sequences) {
  const { gauges, counters, quantiles } = snapshot;
  const numBlocks = ["free", "cached", "allocated", "in_transfer"].reduce((sum, name) => sum + gauges[`num_${name}_blocks`], 0);
  const numInUse = gauges.num_allocated_blocks + gauges.num_in_transfer_blocks;
  const recent = steps.filter((step) => step.endedS > snapshot.time_s - 3);
  const rate = recent.reduce((sum, step) => sum + step.numDecodes + step.numPrefills, 0) / 3;
  const perStep = recent.length ? recent.reduce((sum, step) => sum + step.numDecodes + step.numPrefills, 0) / recent.length : 0;
  showTile("Tokens per second", number(gauges.tokens_per_second, gauges.tokens_per_second < 100 ? 1 : 0), "",
    `${number(counters.generated_tokens_total ?? 0)} since the start`, rate);
  showTile("Batch", number(gauges.num_running_sequences), "running",
    `${number(gauges.num_waiting_sequences)} waiting, ${number(gauges.num_paused_sequences)} paused`, perStep);
  showTile("KV memory in use", number(100 * numInUse / numBlocks, 1), "%",
    `${number(numInUse)} of ${number(numBlocks)} blocks`, numInUse);
  const hits = counters.prefix_hit_tokens_total ?? 0;
  const asked = counters.prefix_query_tokens_total ?? 0;
  history.push({ timeS: snapshot.time_s, hits, asked });
  history = history.filter(({ timeS }) => timeS > snapshot.time_s - WINDOW_S);
  const [first] = history;
  const lately = asked > first.asked ? (hits - first.hits) / (asked - first.asked) : 0;
  showTile("Prefix cache hits", asked ? number(100 * hits / asked, 1) : "–", asked ? "%" : "", `${number(hits)} tokens not computed`, lately);
  const swaps = counters['preemptions_total{kind="swap"}'] ?? 0;
  const recomputes = counters['preemptions_total{kind="recompute"}'] ?? 0;
  const preempted = recent.reduce((sum, step) => sum + step.numPreempted, 0);
  showTile("Preemptions", number(swaps + recomputes), "", `${number(recomputes)} computed again, ${number(swaps)} swapped`, preempted);
  const [median] = quantiles.first_token ?? [];
  showTile("First token", duration(median), "", median === undefined ? "no answer yet" : "median of recent answers", median ?? 0);
}

// The map, its legend and what is pointed at

function swatch(className, colour = "") {
  const made = element("i", { className: `swatch ${className}` });
  if (colour) made.style.setProperty("--swatch", colour);
  return made;
}

function showLegend(snapshot, states) {
  const counts = new Array(STATE_NAMES.length).fill(0);
  for (const state of states) counts[state]++;
  const bySequence = byId("map").dataset.colour !== "state";
  const entries = [
    [OWNED, bySequence ? "is-many" : "is-owned", bySequence ? "owned, a colour per sequence" : "owned"],
    [SHARED, bySequence ? "is-both" : "is-shared", "shared by sequences"],
    [CACHED, "is-cached", "cached, for the next prompt that begins alike"],
    [FREE, "is-free", "free"],
  ];
  if (counts[IN_TRANSFER] || snapshot.gauges.num_host_blocks) entries.push([IN_TRANSFER, "is-transfer", "in transfer"]);
  byId("legend").replaceChildren(...entries.map(([state, className, text]) =>
    element("li", {}, swatch(className), element("b", {}, number(counts[state])), ` ${text}`)));
  byId("map").ariaLabel = `${number(states.length - 1)} blocks of KV memory: ${entries.map(([state]) => `${counts[state]} ${STATE_NAMES[state]}`).join(", ")}`;
}

function showTip(block, x, y) {
  tip.hidden = block < 0;
  if (block < 0) {
    map.lit = picked;
    byId("map-live").textContent = "";
    return;
  }
  const owners = map.ownersOf(block);
  const state = map.stateOf(block);
  const lines = owners.slice(0, 5).map(([sequence, index]) => element("span", { className: "owner" },
    swatch("", sequenceColour(sequence.id, isDark())), `#${sequence.id}, its block ${index + 1} of ${sequence.table.length}`));
  if (owners.length > 5) lines.push(`and ${owners.length - 5} more sequences`);
  const what = owners.length ? `${map.numTokensIn(block)} of ${blockSize} tokens, ${owners.length} ${owners.length === 1 ? "owner" : "owners"}`
    : state === CACHED ? "no owner; its tokens are kept" : state === IN_TRANSFER ? "being copied" : "holds nothing";
  tip.replaceChildren(element("strong", {}, `Block ${block}: ${STATE_NAMES[state]}`), what, element("br"), ...lines);
  const frame = byId("map-frame");
  tip.style.left = `${Math.max(0, Math.min(x + 10, frame.clientWidth - tip.offsetWidth))}px`;
  tip.style.top = `${y + 8}px`;
  map.lit = owners.length ? owners[0][0].id : picked;
  if (document.activeElement === byId("map")) {
    byId("map-live").textContent = `Block ${block}, ${STATE_NAMES[state]}, ${what}. ${owners.slice(0, 3).map(([sequence]) => `sequence ${sequence.id}`).join(", ")}`;
  }
}

// Sequences

const DOING = { prefill: "Reading", decode: "Writing", waiting: "Waiting" };

function showSequences(sequences) {
  const body = byId("sequences");
  const rows = new Map([...body.children].map((row) => [Number(row.dataset.id), row]));
  const shown = sequences.slice(0, MAX_ROWS);
  const wanted = shown.map((sequence) => rows.get(sequence.id) ?? newRow(sequence.id));
  shown.forEach((sequence, index) => fillRow(wanted[index], sequence));
  const isSame = wanted.length === body.children.length && wanted.every((row, index) => body.children[index] === row);
  if (!isSame) {
    const keep = new Set(wanted);
    for (const row of [...body.children]) if (!keep.has(row)) row.remove();
    wanted.forEach((row, index) => { if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null); });
  }
  if (picked !== null && !sequences.some(({ id }) => id === picked)) map.lit = picked = null;
  byId("no-sequences").hidden = sequences.length > 0;
  const numBlocks = sequences.reduce((sum, { table }) => sum + table.length, 0);
  byId("sequences-count").textContent = sequences.length ? `${number(sequences.length)}, with ${number(numBlocks)} blocks in their tables` : "";
}

function newRow(id) {
  const pick = element("button", { type: "button", className: "pick", ariaLabel: `Show the blocks of sequence ${id}` }, swatch(""), `#${id}`);
  pick.addEventListener("click", () => {
    picked = picked === id ? null : id;
    map.lit = picked;
    for (const other of byId("sequences").children) markRow(other);
  });
  const bar = element("span", { className: "bar" }, element("i"));
  const row = element("tr", {}, element("td", {}, pick), element("td"), element("td", { className: "figure" }), element("td", { className: "figure" }), element("td", { className: "figure" }));
  row.dataset.id = id;
  row.children[1].append(element("span"), bar);
  row.addEventListener("mouseenter", () => { map.lit = id; });
  row.addEventListener("mouseleave", () => { map.lit = picked; });
  return row;
}

function markRow(row) {
  const isPicked = Number(row.dataset.id) === picked;
  row.classList.toggle("is-lit", isPicked);
  row.querySelector(".pick").ariaPressed = String(isPicked);
}

function fillRow(row, sequence) {
  const [, doing, tokens, cached, blocks] = row.children;
  const colour = sequenceColour(sequence.id, isDark());
  row.querySelector(".swatch").style.setProperty("--swatch", colour);
  const text = sequence.state === "paused" ? "Paused" : DOING[sequence.phase];
  if (doing.firstChild.textContent !== text) doing.firstChild.textContent = text;
  const isReading = sequence.phase === "prefill";
  const fill = row.querySelector(".bar i");
  fill.style.background = colour;
  fill.style.width = `${100 * sequence.numComputed / sequence.numPrompt}%`;
  fill.parentElement.hidden = !isReading;
  tokens.textContent = isReading ? `${number(sequence.numComputed)} / ${number(sequence.numPrompt)}` : `${number(sequence.numPrompt)} + ${number(sequence.numTokens - sequence.numPrompt)}`;
  tokens.title = isReading ? "prompt tokens read, of all" : "prompt + answer";
  cached.textContent = number(sequence.numCached);
  blocks.textContent = number(sequence.table.length);
  markRow(row);
}

// Latency, memory, engine

/** Of the gaps between a stream's tokens in the last minute: a step's gap counts once for each sequence that decodes. */
function gapQuantiles() {
  const gaps = [];
  for (let at = 1; at < steps.length; at++) {
    const { step, endedS, numDecodes } = steps[at];
    if (numDecodes && step === steps[at - 1].step + 1) gaps.push([endedS - steps[at - 1].endedS, numDecodes]);
  }
  gaps.sort((a, b) => a[0] - b[0]);
  const total = gaps.reduce((sum, [, weight]) => sum + weight, 0);
  return total ? [0.5, 0.9, 0.99].map((share) => {
    let left = share * total;
    return gaps.find(([, weight]) => (left -= weight) <= 0)?.[0] ?? gaps.at(-1)[0];
  }) : [];
}

function showLatency({ quantiles }) {
  const rows = [["First token", quantiles.first_token], ["Between tokens", gapQuantiles()], ["Whole answer", quantiles.e2e], ["In the queue", quantiles.queue]];
  byId("latency").replaceChildren(...rows.map(([name, values = []]) => element("tr", {}, element("th", { scope: "row" }, name),
    ...[0, 1, 2].map((at) => element("td", { className: "figure" }, duration(values[at]))))));
}

function stack(parts, total) {
  const bar = element("span", { className: "stack", role: "presentation" });
  for (const [className, count] of parts) {
    if (!count) continue;
    const part = element("i", { className });
    part.style.width = `${100 * count / total}%`;
    bar.append(part);
  }
  return bar;
}

function showMemory({ gauges, counters }) {
  const device = [["is-owned", gauges.num_allocated_blocks], ["is-transfer", gauges.num_in_transfer_blocks], ["is-cached", gauges.num_cached_blocks]];
  const total = device.reduce((sum, [, count]) => sum + count, gauges.num_free_blocks);
  const entries = [["Device", `${number(gauges.num_allocated_blocks)} owned, ${number(gauges.num_cached_blocks)} cached`, stack(device, total)]];
  for (const [name, tier] of [["Host memory", "host"], ["Disk", "disk"]]) {
    const size = gauges[`num_${tier}_blocks`];
    const used = gauges[`num_used_${tier}_blocks`];
    entries.push([name, size ? `${number(used)} of ${number(size)} blocks` : "off", ...(size ? [stack([["is-cached", used]], size)] : [])]);
  }
  entries.push(["Copies on write", number(counters.copy_on_write_copies_total ?? 0)], ["Evicted blocks", number(counters.prefix_cache_evictions_total ?? 0)]);
  byId("memory").replaceChildren(...entries.map(([name, text, ...bars]) => element("div", {}, element("dt", {}, name), element("dd", {}, text), ...bars)));
}

function showEngine(engine) {
  const facts = [
    ["Model", engine.model], ["Parameters", engine.num_parameters ? `${number(engine.num_parameters / 1e6)} M` : "–"],
    ["Device", `${engine.device}, ${engine.dtype}`], ["Context", `${number(engine.max_model_len)} tokens`],
    ["KV memory", `${number(engine.num_blocks - 1)} blocks × ${engine.block_size} tokens`], ["Largest batch", `${number(engine.max_num_seqs)} sequences`],
    ["Tokens in a step", `at most ${number(engine.max_num_batched_tokens)}`], ["Restarts seen", number(engine.num_losses)],
  ];
  byId("engine").replaceChildren(...facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

// The loop

function showState(state, text) {
  byId("state").dataset.state = state;
  byId("state-text").textContent = text;
}

function showNotice(text, percent = null) {
  byId("notice").hidden = !text;
  byId("notice-text").textContent = text;
  byId("notice-bar").hidden = percent === null;
  byId("notice-bar").value = percent ?? 0;
}

function show({ engine, snapshot }) {
  if (engine.state === "ready") {
    showState("ready", snapshot?.gauges.num_running_sequences ? "Running" : "Idle");
    showNotice(snapshot ? "" : "The engine does not answer");
  } else {
    showState(engine.state === "loading" ? "loading" : "lost", engine.state === "loading" ? "Loading" : "No engine");
    showNotice(`The engine is not ready: ${engine.stage}${engine.state === "loading" ? `, ${Math.round(engine.percent)} %` : ""}`,
      engine.state === "loading" ? engine.percent : null);
  }
  if (engine.epoch === undefined) return;
  if (engine.epoch !== epoch) {
    epoch = engine.epoch;
    newestStep = -1;
    steps = [];
    history = [];
    timeline.clear();
  }
  blockSize = engine.block_size;
  showEngine(engine);
  if (!snapshot) return;
  const sequences = snapshot.sequences.map(sequenceOf);
  const newSteps = snapshot.steps.map(stepOf).filter(({ step }) => step > newestStep);
  newestStep = newSteps.at(-1)?.step ?? newestStep;
  steps.push(...newSteps);
  steps = steps.filter(({ endedS }) => endedS > snapshot.time_s - WINDOW_S);
  showTiles(snapshot, sequences);
  const states = bytesOf(snapshot.block_states);
  if (states.length) {
    map.update(states, sequences, blockSize);
    showLegend(snapshot, states);
  } else {
    byId("too-many").textContent = `${number(engine.num_blocks - 1)} blocks are too many to be drawn one by one.`;
  }
  byId("map").hidden = !states.length;
  byId("too-many").hidden = states.length > 0;
  showSequences(sequences);
  timeline.update(snapshot.time_s, sequences, newSteps);
  showLatency(snapshot);
  showMemory(snapshot);
}

async function poll() {
  let waitMs = EVERY_MS;
  const begunAt = performance.now();
  try {
    const data = await client.getJson("dashboard/data");
    byId("key-form").hidden = true;
    if (!isHeld) show(data);
    waitMs = Math.max(20, EVERY_MS - (performance.now() - begunAt));
  } catch (error) {
    waitMs = AGAIN_MS;
    byId("key-form").hidden = error.status !== 401;
    showState("lost", error.status === 401 ? "API key needed" : "Not reachable");
    showNotice(error.status === 401 ? "" : `No figures: ${error.message}`);
    if (!("status" in error)) throw error;
  } finally {
    if (document.hidden) document.addEventListener("visibilitychange", poll, { once: true });
    else setTimeout(poll, waitMs);
  }
}

for (const input of document.querySelectorAll("[name=colour]")) {
  input.addEventListener("change", () => {
    byId("map").dataset.colour = input.value;
    map.byState = input.value === "state";
  });
}
byId("hold").addEventListener("click", ({ currentTarget }) => {
  isHeld = !isHeld;
  currentTarget.ariaPressed = String(isHeld);
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  client.apiKey = byId("key").value.trim();
  setApiKey(client.apiKey);
});
bindThemeButton(byId("theme"), byId("theme-label"));
poll();
