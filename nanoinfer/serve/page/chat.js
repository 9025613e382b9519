// The chat: a conversation that streams, is stopped, edited and asked again. It is kept in this browser alone.

import { ApiError, events, request } from "./api.js";
import { button, byId, make } from "./dom.js";
import { rendered } from "./render.js";

const STORE = "nanoinfer-chat";
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const LEAST_MS = 60; // between two drawings of an answer that grows

let messages = [];
let running = null; // the AbortController of the answer that streams
let tell = () => {};

const settings = () => ({
  model: byId("choice-model").value,
  system: byId("system").value,
  effort: byId("effort").value,
  tools: byId("tools").value,
  numbers: Object.fromEntries(NUMBERS.map((name) => [name, byId(`set-${name}`).value])),
});

function save() {
  try {
    localStorage.setItem(STORE, JSON.stringify({ messages, settings: settings() }));
  } catch {
    // storage is off or full: the chat lasts until the page is left
  }
}

function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(STORE)) || {};
    messages = (kept.messages || []).filter((one) => ["user", "assistant", "tool"].includes(one.role));
    return kept.settings || {};
  } catch {
    return {};
  }
}

/** Start the chat. say: shows a line of status. */
export async function startChat(say) {
  tell = say;
  for (const name of NUMBERS) {
    const input = make("input");
    Object.assign(input, { id: `set-${name}`, type: "number", step: "any", placeholder: "default" });
    const label = make("label", "", name.replaceAll("_", " "));
    label.htmlFor = input.id;
    byId("numbers").append(make("div", "", label, input));
  }
  const kept = load();
  for (const id of ["system", "effort", "tools"]) byId(id).value = kept[id] || "";
  for (const name of NUMBERS) byId(`set-${name}`).value = kept.numbers?.[name] || "";
  byId("settings").addEventListener("change", save);
  byId("settings").querySelector("form").addEventListener("submit", (event) => event.preventDefault());
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  byId("stop").addEventListener("click", stop);
  byId("clear").addEventListener("click", () => {
    stop();
    messages = [];
    save();
    drawAll();
    byId("text").focus();
  });
  window.addEventListener("pagehide", save);
  drawAll();
  const models = (await (await request("v1/models")).json()).data.map((one) => one.id);
  byId("choice-model").replaceChildren(...models.map((name) => new Option(name, name)));
  if (models.includes(kept.model)) byId("choice-model").value = kept.model;
  byId("model").textContent = models[0] || "";
}

function stop() {
  running?.abort();
}

function send() {
  const text = byId("text").value;
  if (!text.trim() || running) return;
  byId("text").value = "";
  messages.push({ role: "user", content: text });
  drawAll();
  answer();
}

/** What the API gets of the conversation. */
function history() {
  const sent = byId("system").value.trim() ? [{ role: "system", content: byId("system").value }] : [];
  for (const one of messages) {
    if (one.role !== "assistant") {
      sent.push(one.role === "tool" ? { role: "tool", tool_call_id: one.id, content: one.content } : one);
    } else if (one.content || one.calls.length) {
      const entry = { role: "assistant", content: one.content || null };
      if (one.reasoning) entry.reasoning_content = one.reasoning;
      if (one.calls.length) {
        entry.tool_calls = one.calls.map(({ id, name, text }) => ({
          id, type: "function", function: { name, arguments: text },
        }));
      }
      sent.push(entry);
    }
  }
  return sent;
}

/** The body of the request; null where the tools are no JSON. */
function body() {
  const set = settings();
  const asked = { messages: history(), stream: true, stream_options: { include_usage: true } };
  if (set.model) asked.model = set.model;
  for (const [name, value] of Object.entries(set.numbers)) if (value !== "") asked[name] = Number(value);
  if (set.effort) asked.reasoning_effort = set.effort;
  byId("tools-wrong").textContent = "";
  if (set.tools.trim()) {
    try {
      asked.tools = JSON.parse(set.tools);
    } catch (error) {
      byId("settings").open = true;
      byId("tools-wrong").textContent = `The tools are no JSON: ${error.message}`;
      return null;
    }
  }
  return asked;
}

async function answer() {
  const asked = body();
  if (asked === null) return;
  const mine = { role: "assistant", content: "", reasoning: "", calls: [], note: "" };
  messages.push(mine);
  const place = draw(mine, messages.length - 1);
  byId("messages").append(place);
  running = new AbortController();
  show();
  const begun = performance.now();
  let next = 0;
  let waiting = 0;
  const grown = (now = performance.now()) => {
    clearTimeout(waiting);
    if (now < next) {
      waiting = setTimeout(grown, next - now);
      return;
    }
    fill(place, mine);
    follow();
    next = performance.now() + Math.max(LEAST_MS, 5 * (performance.now() - now));
  };
  try {
    for await (const [, data] of events(await request("v1/chat/completions", { body: asked, signal: running.signal }))) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, 500);
      if (event.usage) mine.usage = event.usage;
      for (const choice of event.choices || []) take(mine, choice);
      grown();
    }
    const seconds = (performance.now() - begun) / 1000;
    const cut = mine.finish === "length" ? " · stopped at its limit of tokens" : "";
    const found = mine.usage?.prompt_tokens_details?.cached_tokens;
    if (mine.usage) {
      mine.note = `${mine.usage.prompt_tokens} tokens in${found ? ` (${found} from the cache)` : ""}, ` +
        `${mine.usage.completion_tokens} out, ${seconds.toFixed(1)} s${cut}`;
    }
    tell(mine.usage || mine.finish ? "" : "The answer ended before its end: the connection was lost. Ask again.");
  } catch (error) {
    if (error.name === "AbortError") mine.note = "stopped";
    else {
      mine.note = error instanceof ApiError ? error.message : "the connection was lost: ask again";
      tell(`No answer: ${mine.note}`);
    }
  }
  clearTimeout(waiting);
  running = null;
  save();
  drawAll();
  show();
}

function take(mine, choice) {
  const delta = choice.delta || {};
  mine.content += delta.content || "";
  mine.reasoning += delta.reasoning_content || "";
  for (const call of delta.tool_calls || []) {
    const known = (mine.calls[call.index] ||= { id: "", name: "", text: "" });
    known.id ||= call.id || "";
    known.name ||= call.function?.name || "";
    known.text += call.function?.arguments || "";
  }
  if (choice.finish_reason) mine.finish = choice.finish_reason;
}

function show() {
  if (running === null && document.activeElement === byId("stop")) byId("text").focus();
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("messages").setAttribute("aria-busy", String(running !== null));
}

function follow() {
  const log = byId("messages");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

function drawAll() {
  byId("messages").replaceChildren(...messages.map(draw));
  byId("messages").scrollTop = byId("messages").scrollHeight;
}

const NAMES = { user: "You", assistant: "Answer", tool: "Result of a tool" };

function draw(one, index) {
  const place = make("article", `message ${one.role}`);
  fill(place, one);
  if (running && index === messages.length - 1) return place;
  const tools = make("div", "tools");
  tools.append(button("Copy", `Copy: ${NAMES[one.role]} ${index + 1}`, () => {
    navigator.clipboard?.writeText(one.content).then(() => tell("Copied."), () => tell("The browser refused to copy."));
  }));
  if (one.role === "user") tools.append(button("Edit", `Edit message ${index + 1}`, () => edit(place, index)));
  if (one.role === "assistant") {
    tools.append(button("Regenerate", `Regenerate answer ${index + 1}`, () => {
      if (running) return;
      messages.length = index;
      drawAll();
      answer();
    }));
  }
  place.append(tools);
  if (one.role === "assistant" && index === messages.length - 1 && one.calls.length) place.append(results(one));
  return place;
}

/** Draw what a message says. What was opened stays open. */
function fill(place, one) {
  const open = [...place.querySelectorAll("details")].map((details) => details.open);
  const parts = [make("h3", "", NAMES[one.role])];
  if (one.reasoning) parts.push(make("details", "", make("summary", "", "Thinking"), make("div", "plain", one.reasoning)));
  const text = make("div", "text");
  if (one.role === "user") text.textContent = one.content;
  else if (one.role === "tool") text.append(make("pre", "", make("code", "", one.content)));
  else text.append(rendered(one.content));
  parts.push(text);
  for (const call of one.calls || []) {
    const shown = make("details", "", make("summary", "", `Calls ${call.name}`), make("pre", "", make("code", "", call.text)));
    shown.open = true;
    parts.push(shown);
  }
  if (one.note) parts.push(make("p", "quiet", one.note));
  place.replaceChildren(...parts);
  place.querySelectorAll("details").forEach((details, number) => {
    if (number < open.length) details.open = open[number];
  });
}

function edit(place, index) {
  if (running) return;
  const text = make("textarea");
  text.value = messages[index].content;
  text.rows = 4;
  text.setAttribute("aria-label", `Message ${index + 1}`);
  const again = button("Send again", "", () => {
    if (running || !text.value.trim()) return;
    messages.length = index;
    messages.push({ role: "user", content: text.value });
    drawAll();
    answer();
  });
  place.replaceChildren(text, make("div", "tools", again, button("Leave it", "", drawAll)));
  text.focus();
}

/** A form for the results of an answer's calls, which nobody here makes. */
function results(one) {
  const form = make("form");
  const fields = one.calls.map((call) => {
    const field = make("textarea");
    field.rows = 2;
    const label = make("label", "", `Result of ${call.name}`, field);
    form.append(label);
    return field;
  });
  const give = make("button", "", "Give the results");
  form.append(make("div", "buttons", give));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    one.calls.forEach((call, number) => messages.push({ role: "tool", id: call.id, content: fields[number].value }));
    drawAll();
    answer();
  });
  return form;
}
