// The engine's picture. Nothing moves but by figures that the server measured; rates are made from two of them.

import { ApiError, events, request } from "./api.js";
import { byId, make } from "./dom.js";
import { Plots } from "./plots.js";

const RATE_SECONDS = 1; // at least so long between the two
const BOXES = [["gpu", ""], ["link", "", "link"], ["host", ""], ["speed", ""]];
const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits });
const share = (value) => `${number(100 * value)} %`;

function size(bytes) {
  for (const [unit, least] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (bytes >= least) return `${number(bytes / least, 2)} ${unit}`;
  }
  return `${number(bytes)} bytes`;
}

const PLOTS = [
  { title: "Tokens out", unit: "a second", value: (_, rates) => rates.num_generated_tokens },
  { title: "Tokens of prompts computed", unit: "a second", value: (_, rates) => rates.num_prefill_tokens },
  { title: "Link", unit: "GB/s to the GPU", value: (_, rates) => rates.streamed_bytes / 1e9 },
  { title: "Sequences", unit: "run", value: (now) => now.num_running },
  { title: "KV", unit: "% of the GPU's blocks held", value: (now) => 100 * now.gpu_kv_share },
];

let declared = [];
let plots = null;
let chosen = "";
let state = null; // of the replica that is shown: facts, now, rates, base, read, told
let cells = new Map();

/** Follow the engine for ever. say: shows a line of status. */
export async function followEngine(say) {
  plots = new Plots(byId("plots"), PLOTS);
  byId("replica").addEventListener("change", () => begin(byId("replica").value));
  setInterval(age, 500);
  for (let wait = 500; ; wait = Math.min(2 * wait, 8000)) {
    try {
      const told = await (await request("engine")).json();
      declare(told);
      say("");
      await follow(told.replicas.length > 1, () => {
        wait = 500;
        say("");
      });
    } catch (error) {
      const why = error instanceof ApiError ? error.message : "the connection is lost";
      if (state) state.lost = true;
      age();
      say(`Engine: ${why}; trying again`);
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

async function follow(isFleet, heard) {
  if (!isFleet) {
    try {
      for await (const [name, data] of events(await request("engine/events"))) {
        const event = JSON.parse(data);
        if (name === "error") throw new ApiError(event.error.message, 503);
        heard();
        take(event);
      }
      throw new Error("the events have ended");
    } catch (error) {
      if (!(error instanceof ApiError && error.status === 404)) throw error;
    }
  }
  for (;;) { // a fleet has no events
    const told = await (await request("engine")).json();
    heard();
    declare(told);
    await new Promise((done) => setTimeout(done, 1000));
  }
}

function declare(told) {
  declared = told.declared;
  const names = told.replicas.map((one) => one.name);
  const select = byId("replica");
  select.hidden = names.length < 2;
  if ([...select.options].map((one) => one.value).join() !== names.join()) {
    select.replaceChildren(...names.map((name) => new Option(name || "server", name)));
  }
  if (!names.includes(chosen) || state === null) begin(names.includes(chosen) ? chosen : names[0]);
  const mine = told.replicas.find((one) => one.name === chosen);
  state.facts = mine.facts;
  take(mine);
}

function begin(name) {
  chosen = byId("replica").value = name;
  state = { facts: null, now: null, rates: {}, base: null, read: 0, stepped: 0, lost: false };
  plots.clear();
}

function take(event) {
  const heard = performance.now() / 1000;
  Object.assign(state, { read: heard - event.age, stepped: event.step_seconds, lost: false });
  if (event.figures) {
    state.now = event.figures;
    const base = state.base;
    if (base === null) state.base = { read: state.read, figures: event.figures };
    else if (state.read - base.read >= RATE_SECONDS) point(state.read);
  } else if (state.base && heard - state.base.read >= 2 * RATE_SECONDS && !event.step_seconds) {
    point(heard); // nothing has happened since
  }
  draw();
}

function point(read) {
  const { base, now } = state;
  const seconds = read - base.read;
  // After a restart counters are below what they were.
  const counters = declared.filter((one) => one.kind === "counter").map((one) => one.name);
  state.rates = Object.fromEntries(counters.map((name) => [name, Math.max(0, now[name] - base.figures[name]) / seconds]));
  state.base = { read, figures: now };
  plots.add(read, now, state.rates, state.facts);
}

function age() {
  if (!state?.now) return;
  const seconds = performance.now() / 1000 - state.read;
  const step = state.stepped > 1 ? `; a step has run for ${number(state.stepped, 1)} s` : "";
  const lost = state.lost ? "; the connection is lost" : "";
  const isIdle = !state.stepped && !state.lost && seconds > 2;
  const old = isIdle ? `nothing has run for ${number(seconds)} s` : `figures of ${number(seconds, 1)} s ago`;
  const text = `${state.now.mode} mode; ${old}${step}${lost}`;
  if (byId("age").textContent !== text) byId("age").textContent = text;
}

function row(place, key, name, said, parts = []) {
  let found = cells.get(key);
  if (!found) {
    found = { row: make("div", "row"), said: make("div", "said"), bar: make("div", "bar") };
    found.bar.setAttribute("aria-hidden", "true"); // the text says the same
    found.row.append(make("div", "name", name), found.bar, found.said);
    cells.set(key, found);
  }
  if (found.row.parentNode !== place) place.append(found.row);
  if (found.said.textContent !== said) found.said.textContent = said;
  found.bar.hidden = !parts.length;
  parts.forEach(([kind, portion], index) => {
    const piece = found.bar.children[index] || found.bar.appendChild(make("i"));
    piece.className = kind;
    piece.style.width = `${100 * Math.min(1, Math.max(0, portion || 0))}%`;
  });
  found.used = true;
}

function box(key, title, kind = "") {
  let found = cells.get(key);
  if (!found) {
    found = { row: make("div", `place ${kind}`, make("h3")) };
    cells.set(key, found);
    byId("picture").append(found.row);
  }
  found.row.firstChild.textContent = title;
  found.used = true;
  return found.row;
}

function blocks(place, tier, name) {
  const [total, used, cached] = ["total", "used", "cached"].map((one) => state.now[`${tier}_blocks_${one}`]);
  const said = `${number(used)} blocks held, ${number(cached)} cached, of ${number(total)} (${size(total * state.facts.block_bytes)})`;
  row(place, `${tier}-kv`, name, said, [["held", used / total], ["cached", cached / total]]);
}

function draw() {
  const { facts, now, rates } = state;
  if (!now || !facts) return;
  for (const one of BOXES) box(...one); // in this order
  for (const one of cells.values()) one.used = false;
  const here = facts.is_host ? "in memory" : "on the GPU";
  const gpu = box("gpu", facts.is_host ? "Memory (no GPU: the CPU computes)" : "GPU");
  row(gpu, "batch", "Batch", `${now.num_running} of at most ${facts.max_num_seqs} sequences run, ${now.num_waiting} wait` +
    (now.is_computing_ahead ? "; what runs is computed ahead, for prompts that may come" : ""),
    [[now.is_computing_ahead ? "cached" : "held", now.num_running / facts.max_num_seqs]]);
  blocks(gpu, "gpu", "KV blocks");
  if (now.state_slots_total) {
    row(gpu, "states", "States beside attention", `${now.state_slots_used} of ${now.state_slots_total} sequences have one; ` +
      `${number(now.num_snapshots)} snapshots were kept on the host`, [["held", now.state_slots_used / now.state_slots_total]]);
  }
  const weights = facts.weight_bytes + facts.host_weight_bytes;
  row(gpu, "weights", "Weights", `${size(facts.weight_bytes)} ${here}`, [["held", facts.weight_bytes / weights]]);
  const asked = (rates.expert_hits || 0) + (rates.expert_fetches || 0);
  if (facts.num_expert_slots) {
    row(gpu, "slots", "Experts in slots", `${facts.num_expert_slots} of ${facts.num_experts} in each of ${facts.num_sparse_layers} layers; ` +
      (asked ? `${share(rates.expert_hits / asked)} of those chosen were found there` : "none are asked for"),
      [["held", asked ? rates.expert_hits / asked : 0]]);
  }
  row(gpu, "budget", "Budget", `${size(facts.total_bytes)} planned of ${size(facts.budget_bytes)}`,
    [["held", facts.total_bytes / facts.budget_bytes]]);
  drawLink(facts, now, rates);
  if (!facts.is_host || now.host_blocks_total) {
    const host = box("host", "Host memory");
    if (now.host_blocks_total) blocks(host, "host", "KV blocks");
    else row(host, "host-kv", "KV blocks", "none: all KV is resident so far");
    if (facts.host_weight_bytes) {
      row(host, "host-weights", "Weights", `${size(facts.host_weight_bytes)}; ${size(now.streamed_weight_bytes)} of it stream in each step`,
        [["stream", facts.host_weight_bytes / weights]]);
    }
  }
  const speed = box("speed", "Speed");
  const ofStep = rates.num_decode_steps ? rates.num_decode_tokens / rates.num_decode_steps : 0;
  const floor = now.step_floor_seconds && ofStep
    ? `, where link and memory at full speed allow ${number(ofStep / now.step_floor_seconds, 1)} in decode steps` : "";
  row(speed, "out", "Tokens", `${number(rates.num_generated_tokens || 0, 1)} a second out${floor}; of prompts ` +
    `${number(rates.num_prefill_tokens || 0, 1)} computed, ${number(rates.prefix_cache_hit_tokens || 0, 1)} found in the cache`);
  const isPrefill = (rates.prefill_seconds || 0) > (rates.decode_seconds || 0);
  row(speed, "bound", "Bound by", isPrefill ? "prefill" : `${now.bound} (decode steps of the last seconds)`);
  const queried = now.prefix_cache_queried_tokens;
  if (facts.caches_prefixes) {
    const parted = now.prefix_parted_last ? `; a prompt parted from a recent one at token ${number(now.prefix_parted_last)}` : "";
    row(speed, "prefix", "Prefix cache", `${queried ? share(now.prefix_cache_hit_tokens / queried) : "none"} of the prompts' tokens ` +
      `so far${parted}; ${number(now.computed_ahead_tokens)} tokens computed ahead`,
      [["held", queried ? now.prefix_cache_hit_tokens / queried : 0]]);
  }
  if (now.num_drafted_tokens) {
    const right = now.num_accepted_tokens / now.num_drafted_tokens;
    row(speed, "drafts", "Drafts", `${share(right)} of ${number(now.num_drafted_tokens)} guessed tokens were right; ` +
      `${number(rates.num_accepted_tokens || 0, 1)} a second`, [["held", right]]);
  }
  for (const one of cells.values()) one.row.hidden = !one.used;
  if (byId("figures").closest("details").open) drawFigures();
  age();
}

function drawLink(facts, now, rates) {
  const most = facts.link_bytes_per_second;
  const full = now.kv_blocks_resident + now.kv_blocks_streamed;
  const streamed = rates.streamed_bytes || 0;
  if (most === null && !full && !streamed) return;
  const link = box("link", "Between them", "link");
  if (most !== null) {
    row(link, "rate", "↑ Link to the GPU", `${number(streamed / 1e9, 2)} GB/s of ${number(most / 1e9)}, busy ` +
      `${share(now.link_busy_fraction)} of the decode steps' time`, [["stream", streamed / most]]);
    row(link, "written", "↓ Link to the host", `${number((rates.written_bytes || 0) / 1e9, 2)} GB/s`,
      [["stream", (rates.written_bytes || 0) / most]]);
  } else row(link, "rate", "↑ Copies", `${number(streamed / 1e9, 3)} GB/s`);
  if (full || most !== null) {
    row(link, "ring", "KV blocks that a step reads", `${number(now.kv_blocks_resident)} resident, ` +
      `${number(now.kv_blocks_streamed)} through the ring of ${size(facts.ring_bytes)}`,
      full ? [["held", now.kv_blocks_resident / full], ["stream", now.kv_blocks_streamed / full]] : []);
  }
  if (facts.num_expert_slots) {
    row(link, "fetched", "Experts brought", `${number(rates.expert_fetches || 0, 1)} a second, ${size(rates.expert_fetched_bytes || 0)}/s`,
      most === null ? [] : [["stream", (rates.expert_fetched_bytes || 0) / most]]);
  }
}

function drawFigures() {
  const place = byId("figures");
  const shown = { ...state.facts, ...state.now };
  if (place.children.length !== declared.length) {
    place.replaceChildren(...declared.map(({ name, meaning }) => {
      const head = make("th", "", name);
      head.scope = "row";
      return make("tr", "", head, make("td"), make("td", "", meaning));
    }));
  }
  declared.forEach(({ name, unit }, index) => {
    const value = shown[name];
    const said = typeof value === "number" ? `${number(value, 3)} ${unit}` : String(value);
    const cell = place.children[index].children[1];
    if (cell.textContent !== said) cell.textContent = said;
  });
}
