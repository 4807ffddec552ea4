/** The chat page: what is said, kept and shown. The answers come through streamkv.js, Markdown through markdown.js. */

import { copyText, MarkdownView } from "./markdown.js";
import { deleteChat, download, loadChats, newChat, newId, onOtherTab, saveChat, tabId } from "./store.js";
import { StreamKV, StreamKVError } from "./streamkv.js";
import { apiKey, bindThemeButton, read, setApiKey, write } from "./theme.js";

const SETTINGS = "streamkv.settings";
const CURRENT = "streamkv.current";
const DEFAULTS = {
  transport: "sse", temperature: 0.7, top_p: 0.95, top_k: 0, min_p: 0, max_tokens: 1024, seed: "", repetition_penalty: 1,
  presence_penalty: 0, stop_strings: "",
};
const NEUTRAL = { temperature: 1, top_p: 1, top_k: 0, min_p: 0, max_tokens: "", seed: "", repetition_penalty: 1, presence_penalty: 0 };
const SAVE_EVERY_MS = 300;
const ABANDONED_AFTER_MS = 4000; // without a sign of the tab that was writing an answer
const NEAR_END_PX = 90;
const MAX_TITLE = 60;
const IDEAS = [
  "Explain paged attention to a child",
  "Write a short poem about the sea at night",
  "A Python function that tells whether a number is prime",
  "Compare tea and coffee in a table",
];

const byId = (id) => document.getElementById(id);
const [scroller, list, empty, prompt, sendButton, stopButton, toEnd, sidebar, shade] = [
  "scroller", "messages", "empty", "prompt", "send", "stop", "to-end", "sidebar", "shade",
].map(byId);

const client = new StreamKV({ baseUrl: location.href, apiKey: apiKey() });
const settings = { ...DEFAULTS, ...keptSettings() };
let chats = loadChats();
let current = chats.find((chat) => chat.id === read(CURRENT)) ?? chats[0] ?? newChat();
const runs = new Map(); // chat id → Run: the answers that are being written
const views = new Map(); // message id → MessageView, of the chat that is shown

function keptSettings() {
  try {
    const kept = JSON.parse(read(SETTINGS) ?? "{}");
    return Object.fromEntries(Object.entries(kept).filter(([name]) => name in DEFAULTS));
  } catch {
    return {}; // not ours, or damaged
  }
}

// Small things

function element(name, properties = {}, ...children) {
  const { dataset, ...rest } = properties;
  const made = Object.assign(document.createElement(name), rest);
  Object.assign(made.dataset, dataset);
  made.append(...children);
  return made;
}

function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#i-${name}`);
  svg.append(use);
  return svg;
}

function iconButton(name, label, onClick) {
  const button = element("button", { type: "button", className: "icon-button", title: label, ariaLabel: label }, icon(name));
  button.addEventListener("click", onClick);
  return button;
}

function announce(text) {
  byId("announcer").textContent = text;
}

const titleOf = (chat) => chat.title || "New chat";
const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
const seconds = (value) => (value < 1 ? `${number(value * 1000)} ms` : `${number(value, value < 10 ? 2 : 1)} s`);

function keep(chat) {
  if (!chat.messages.length && !chat.draft && !chat.system) return;
  if (!saveChat(chat)) announce("This browser's storage is full: the chat is not kept. Delete or export some.");
}

// What is said

/** One answer while it is written. */
class Run {
  constructor(chat, message) {
    this.chat = chat;
    this.message = message;
    this._savedAt = 0;
    this._answer = null;
  }

  /** Ask anew, or take up what was being written. */
  async start(answer) {
    const { chat, message } = this;
    this._answer = answer;
    runs.set(chat.id, this);
    Object.assign(message, { state: "writing", error: null, owner: tabId });
    this._save();
    onRunsChanged(chat);
    views.get(message.id)?.refresh();
    try {
      for await (const event of answer) this._take(event);
      if (message.state === "writing") message.state = "done";
    } catch (error) {
      if (!(error instanceof StreamKVError)) console.error(error);
      message.state = "failed";
      message.error = {
        message: error.message, status: error.status ?? 0, code: error.code ?? null,
        retryAt: error.retryAfterS ? Date.now() + error.retryAfterS * 1000 : 0,
      };
      if (error.status === 0 || error.status === 503) watchServer();
      if (error.status === 401) showKeyNeeded(true);
    }
    runs.delete(chat.id);
    message.notice = "";
    message.cursor = null;
    chat.updated = Date.now();
    keep(chat);
    onRunsChanged(chat);
    views.get(message.id)?.refresh();
    if (chat === current) announce(message.state === "failed" ? `The answer failed: ${message.error.message}` : "The answer is complete");
  }

  stop() {
    this.message.state = "stopped";
    this._answer.cancel();
  }

  /** Write down how far it is; a reload goes on from there. */
  save() {
    this._save();
  }

  _save() {
    this._savedAt = Date.now();
    this.message.savedAt = this._savedAt;
    this.message.cursor = this._answer.cursor.streamId === null ? null : { ...this._answer.cursor };
    keep(this.chat);
  }

  _take(event) {
    const { message } = this;
    const now = Date.now();
    switch (event.type) {
      case "started":
        message.notice = "";
        this._save();
        break;
      case "delta":
        message.notice = "";
        message.text += event.text;
        message.reasoning = (message.reasoning ?? "") + event.reasoning;
        message.firstAt ??= now;
        message.lastAt = now;
        message.numTokens = event.numTokens;
        if (now - this._savedAt > SAVE_EVERY_MS) this._save();
        break;
      case "finished":
        message.finishReason = event.finishReason;
        message.numTokens = event.numTokens;
        if (event.finishReason === "abort" && message.state === "writing") {
          message.state = "stopped";
          message.cause = event.cause;
        }
        break;
      case "done":
        message.usage = event.usage;
        break;
      case "reconnecting":
        message.notice = `The connection broke. Trying again (${event.attempt})`;
        break;
      case "reconnected":
        message.notice = "";
        break;
    }
    views.get(message.id)?.refreshSoon();
  }
}

function requestOf(chat, upTo) {
  const messages = [];
  if (chat.system.trim()) messages.push({ role: "system", content: chat.system });
  for (const { role, text, state } of chat.messages.slice(0, upTo)) {
    if (role === "user" || (text && state !== "writing")) messages.push({ role, content: text });
  }
  const request = { messages };
  for (const [name, neutral] of Object.entries(NEUTRAL)) {
    if (settings[name] !== neutral && settings[name] !== "") request[name] = Number(settings[name]);
  }
  const stop = settings.stop_strings.split("\n").filter(Boolean);
  if (stop.length) request.stop = stop;
  return request;
}

/** Have the last message of a chat answered. */
function ask(chat) {
  const request = requestOf(chat, chat.messages.length);
  const message = { id: newId(), role: "assistant", text: "", state: "writing", startedAt: Date.now(), transport: settings.transport };
  chat.messages.push(message);
  chat.updated = Date.now();
  if (chat === current) appendView(message);
  new Run(chat, message).start(client.stream(request, { transport: settings.transport }));
}

function send(text) {
  const chat = current;
  if (!chats.includes(chat)) chats.unshift(chat);
  chat.title ||= text.trim().replace(/\s+/g, " ").slice(0, MAX_TITLE);
  const message = { id: newId(), role: "user", text };
  chat.messages.push(message);
  chat.draft = "";
  appendView(message);
  ask(chat);
  byId("title").textContent = titleOf(chat);
  scrollToEnd();
}

/** Answer again from this message on; what comes after it goes. */
function answerAgain(chat, index) {
  if (runs.has(chat.id)) return;
  chat.messages.length = index;
  show(chat, { keepsFocus: true });
  ask(chat);
  scrollToEnd();
}

const looks = new Map(); // chat id → timer: another tab writes an answer there; its saving shows that it lives

/** Answers that were being written when their page went: go on with them. */
function takeUp(chat) {
  clearTimeout(looks.get(chat.id));
  looks.delete(chat.id);
  const message = chat.messages.at(-1);
  if (message?.state !== "writing" || runs.has(chat.id)) return;
  if (message.owner !== tabId && Date.now() - (message.savedAt ?? 0) < ABANDONED_AFTER_MS) {
    looks.set(chat.id, setTimeout(() => {
      const found = chats.find(({ id }) => id === chat.id);
      if (found) takeUp(found);
    }, ABANDONED_AFTER_MS));
    return;
  }
  if (!message.cursor) {
    Object.assign(message, {
      state: "failed", error: { message: "This answer was interrupted before the server had named it", status: 0, retryAt: 0 },
    });
    keep(chat);
    return;
  }
  new Run(chat, message).start(client.attach(message.cursor));
}

// What is shown

class MessageView {
  constructor(chat, message) {
    this.chat = chat;
    this.message = message;
    this._isDue = false;
    this._countdown = 0;
    this.root = element("li", { className: `message ${message.role}` });
    this.root.append(element("span", { className: "visually-hidden" }, message.role === "user" ? "You said" : "The answer"));
    if (message.role === "user") {
      this._body = element("div", { className: "body", dir: "auto" }, message.text);
      this.root.append(this._body, this._userRow());
    } else {
      this._thinking = element("details", { className: "thinking", hidden: true });
      this._thought = element("p", { dir: "auto" });
      this._thinking.append(element("summary", {}, "Thinking"), this._thought);
      this._body = element("div", { className: "body markdown" });
      this._markdown = new MarkdownView(this._body);
      this._notice = element("div", { className: "notice", hidden: true });
      this._foot = element("div");
      this.root.append(element("img", { className: "mark", src: "page/icon.svg", alt: "" }), this._thinking, this._body, this._notice, this._foot);
      this.refresh();
    }
  }

  refreshSoon() {
    if (this._isDue) return;
    this._isDue = true;
    requestAnimationFrame(() => {
      this._isDue = false;
      this.refresh();
    });
  }

  refresh() {
    const { message, root } = this;
    const isWriting = message.state === "writing";
    const follows = isAtEnd();
    root.classList.toggle("is-writing", isWriting);
    root.ariaBusy = String(isWriting);
    this._markdown.update(message.text);
    this._thinking.hidden = !message.reasoning;
    if (message.reasoning) {
      this._thinking.open ||= isWriting && !message.text;
      if (message.text && !this._wasFolded) {
        this._wasFolded = true;
        this._thinking.open = false;
      }
      this._thought.textContent = message.reasoning;
    }
    const notice = message.notice || (isWriting && !message.text && !message.reasoning ? "Waiting for the first token" : "");
    this._notice.hidden = !notice;
    this._notice.textContent = notice;
    this._refreshFoot(isWriting);
    if (follows) scrollToEnd();
    else showToEnd();
  }

  _refreshFoot(isWriting) {
    clearInterval(this._countdown);
    const { message } = this;
    const figures = figuresOf(message);
    const list = element("dl", { className: "figures" }, ...figures.map(([name, value, title]) =>
      element("div", { title }, element("dt", {}, name), element("dd", {}, value))));
    if (isWriting) {
      this._foot.replaceChildren(element("div", { className: "row", ariaHidden: "true" }, list));
      return;
    }
    const index = this.chat.messages.indexOf(message);
    const copied = element("span", { className: "visually-hidden" });
    const row = element("div", { className: "row" },
      iconButton("copy", "Copy the answer", () => {
        copyText(message.text, copied);
        announce("Copied");
      }),
      iconButton("again", "Answer again", () => answerAgain(this.chat, index)),
      list);
    const parts = [row];
    if (message.error) parts.unshift(this._errorBox(index));
    else if (message.cause === "attached_elsewhere") parts.unshift(element("div", { className: "notice" }, "This answer goes on in another tab"));
    this._foot.replaceChildren(...parts);
  }

  _errorBox(index) {
    const { error } = this.message;
    const box = element("div", { className: "error", role: "alert" }, element("p", {}, explain(error)));
    if (error.status === 401) {
      const button = element("button", { type: "button", className: "small" }, "Enter the API key");
      button.addEventListener("click", () => openSettings("api-key"));
      box.append(button);
    }
    const again = element("button", { type: "button", className: "small" }, "Try again");
    again.addEventListener("click", () => answerAgain(this.chat, index));
    box.append(again);
    const count = () => {
      const leftS = Math.ceil((error.retryAt - Date.now()) / 1000);
      again.disabled = leftS > 0;
      again.textContent = leftS > 0 ? `Try again in ${leftS} s` : "Try again";
      if (leftS <= 0) clearInterval(this._countdown);
    };
    if (error.retryAt > Date.now()) this._countdown = setInterval(count, 500);
    count();
    return box;
  }

  _userRow() {
    return element("div", { className: "row" },
      iconButton("copy", "Copy the message", () => {
        copyText(this.message.text, element("span"));
        announce("Copied");
      }),
      iconButton("edit", "Edit the message", () => this._edit()));
  }

  _edit() {
    if (runs.has(this.chat.id)) return announce("Stop the answer before you edit");
    const area = element("textarea", { value: this.message.text, dir: "auto", ariaLabel: "Edit the message" });
    const done = element("button", { type: "submit", className: "primary" }, "Send");
    const back = element("button", { type: "button", className: "quiet" }, "Cancel");
    const form = element("form", { className: "edit" }, area, element("div", { className: "buttons" }, back, done));
    const close = () => {
      form.replaceWith(this._body);
      this.root.querySelector(".row").hidden = false;
      this.root.querySelector("[aria-label^=Edit]").focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!area.value.trim()) return;
      this.message.text = area.value;
      answerAgain(this.chat, this.chat.messages.indexOf(this.message) + 1);
      prompt.focus();
    });
    back.addEventListener("click", close);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this._body.replaceWith(form);
    this.root.querySelector(".row").hidden = true;
    area.focus();
  }
}

/** [name, value, what it means] of what is known of an answer's speed and size. */
function figuresOf(message) {
  const found = [];
  const numTokens = message.usage?.completion_tokens ?? message.numTokens ?? 0;
  if (message.firstAt) {
    found.push(["First token", seconds((message.firstAt - message.startedAt) / 1000), "Time from sending to the first token"]);
    const spanS = (message.lastAt - message.firstAt) / 1000;
    if (numTokens > 1 && spanS > 0) {
      found.push(["Speed", `${number((numTokens - 1) / spanS, 1)} tok/s`, "Tokens per second after the first"]);
    }
  }
  if (numTokens) found.push(["Tokens", number(numTokens), "Tokens of the answer"]);
  const { usage } = message;
  if (usage) {
    found.push(["Prompt", number(usage.prompt_tokens), "Tokens of the prompt"]);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    if (cached) found.push(["Cached", number(cached), "Prompt tokens that were found in the cache"]);
  }
  const ends = { length: "cut at max_tokens", abort: "stopped", tool_calls: "calls a tool" };
  if (ends[message.finishReason]) found.push(["End", ends[message.finishReason], "Why the answer ended"]);
  else if (message.state === "stopped") found.push(["End", "stopped", "Why the answer ended"]);
  return found;
}

function explain({ status, message, code }) {
  if (status === 401) return `The server asks for an API key. ${message}`;
  if (status === 429) return `Too many requests: ${message}`;
  if (code === "unknown_stream") return "The server does not have this answer any more.";
  if (status === 503) return `The server cannot answer now: ${message}`;
  return message[0].toUpperCase() + message.slice(1);
}

const isAtEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END_PX;

function showToEnd() {
  toEnd.hidden = isAtEnd();
}

function scrollToEnd() {
  scroller.scrollTop = scroller.scrollHeight;
  toEnd.hidden = true;
}

function appendView(message) {
  const view = new MessageView(current, message);
  views.set(message.id, view);
  list.append(view.root);
  empty.hidden = true;
}

function show(chat, { keepsFocus = false } = {}) {
  current = chat;
  write(CURRENT, chat.id);
  views.clear();
  list.replaceChildren();
  for (const message of chat.messages) appendView(message);
  empty.hidden = chat.messages.length > 0;
  byId("title").textContent = titleOf(chat);
  prompt.value = chat.draft;
  fitPrompt();
  onRunsChanged(chat);
  scrollToEnd();
  if (!keepsFocus) prompt.focus();
}

function onRunsChanged(chat) {
  showChats();
  if (chat !== current) return;
  const isWriting = runs.has(chat.id);
  const hadFocus = document.activeElement === sendButton || document.activeElement === stopButton;
  sendButton.hidden = isWriting;
  stopButton.hidden = !isWriting;
  if (hadFocus) (isWriting ? stopButton : prompt).focus();
  if (isWriting) announce("The answer is being written");
  updateSend();
}

function showChats() {
  if (document.activeElement?.closest("#chats input")) return;
  const focused = document.activeElement?.closest("#chats li")?.dataset.id;
  const role = document.activeElement?.dataset.role;
  chats.sort((a, b) => b.updated - a.updated);
  byId("chats").replaceChildren(...chats.map(chatItem));
  if (focused) byId("chats").querySelector(`[data-id="${focused}"] [data-role="${role}"]`)?.focus();
}

function chatItem(chat) {
  const open = element("button", { type: "button", className: "open", title: titleOf(chat), dataset: { role: "open" }, dir: "auto" });
  if (runs.has(chat.id)) open.append(element("span", { className: "writing", role: "img", ariaLabel: "An answer is being written" }));
  open.append(titleOf(chat));
  open.addEventListener("click", () => {
    show(chat);
    closeSidebar();
  });
  const tool = (role, name, label, onClick) => {
    const button = iconButton(name, `${label}: ${titleOf(chat)}`, onClick);
    button.dataset.role = role;
    return button;
  };
  const item = element("li", { dataset: { id: chat.id } }, open, element("span", { className: "tools" },
    tool("rename", "edit", "Rename", () => rename(chat, item)),
    tool("export", "export", "Export", () => download(`${fileName(chat)}.json`, exported(chat))),
    tool("delete", "trash", "Delete", () => remove(chat))));
  if (chat === current) {
    item.classList.add("is-current");
    open.ariaCurrent = "true";
  }
  return item;
}

const fileName = (chat) => `streamkv-${titleOf(chat).toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "chat"}`;

/** A chat as others read it: OpenAI's messages, and beside them what is known of each. */
function exported(chat) {
  const { title, created, updated, system } = chat;
  const messages = chat.messages.map(({ role, text, reasoning, finishReason, usage, startedAt, firstAt, lastAt }) =>
    ({ role, content: text, reasoning: reasoning || undefined, finish_reason: finishReason, usage,
      seconds_to_first_token: firstAt ? (firstAt - startedAt) / 1000 : undefined,
      seconds: lastAt ? (lastAt - startedAt) / 1000 : undefined }));
  return {
    title, created: new Date(created).toISOString(), updated: new Date(updated).toISOString(),
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
  };
}

function rename(chat, item) {
  const input = element("input", { value: titleOf(chat), maxLength: 200, ariaLabel: "Name of the chat", dir: "auto" });
  let isOver = false;
  const close = (isKept) => {
    if (isOver) return;
    isOver = true;
    if (isKept && input.value.trim()) {
      chat.title = input.value.trim();
      keep(chat);
      if (chat === current) byId("title").textContent = titleOf(chat);
    }
    input.remove();
    showChats();
    byId("chats").querySelector(`[data-id="${chat.id}"] [data-role="rename"]`)?.focus();
  };
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === "Escape") {
      event.preventDefault();
      event.stopPropagation();
      close(event.key === "Enter");
    }
  });
  input.addEventListener("blur", () => close(true));
  item.replaceChildren(input);
  input.select();
}

function remove(chat) {
  if (!confirm(`Delete “${titleOf(chat)}”? This cannot be undone.`)) return;
  runs.get(chat.id)?.stop();
  forget(chat);
  deleteChat(chat);
}

function forget(chat) {
  chats = chats.filter((other) => other !== chat);
  chat.messages = [];
  chat.draft = chat.system = "";
  if (chat === current) show(chats[0] ?? newChat());
  else showChats();
}

// The message box

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  updateSend();
}

function updateSend() {
  sendButton.disabled = !prompt.value.trim();
}

function submit() {
  const text = prompt.value;
  if (!text.trim()) return;
  if (runs.has(current.id)) return announce("An answer is being written: wait, or stop it with Escape");
  prompt.value = "";
  fitPrompt();
  send(text);
}

let draftTimer = 0;
prompt.addEventListener("input", () => {
  fitPrompt();
  current.draft = prompt.value;
  const chat = current;
  clearTimeout(draftTimer);
  draftTimer = setTimeout(() => keep(chat), SAVE_EVERY_MS);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
  prompt.focus();
});
stopButton.addEventListener("click", () => runs.get(current.id)?.stop());
toEnd.addEventListener("click", scrollToEnd);
scroller.addEventListener("scroll", showToEnd, { passive: true });
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.defaultPrevented || byId("settings").open) return;
  if (sidebar.classList.contains("is-open")) closeSidebar();
  else runs.get(current.id)?.stop();
});

// Chats, theme, settings

function closeSidebar() {
  if (!sidebar.classList.contains("is-open")) return;
  sidebar.classList.remove("is-open");
  shade.hidden = true;
  byId("open-sidebar").ariaExpanded = "false";
  byId("open-sidebar").focus();
}

byId("open-sidebar").addEventListener("click", () => {
  sidebar.classList.add("is-open");
  shade.hidden = false;
  byId("open-sidebar").ariaExpanded = "true";
  byId("new-chat").focus();
});
byId("close-sidebar").addEventListener("click", closeSidebar);
shade.addEventListener("click", closeSidebar);
byId("new-chat").addEventListener("click", () => {
  closeSidebar();
  show(current.messages.length ? newChat() : current);
});
byId("export-all").addEventListener("click", () => download("streamkv-chats.json", chats.map(exported)));
bindThemeButton(byId("theme"), byId("theme-label"));

const dialog = byId("settings");

function openSettings(focusOn = "") {
  byId("system").value = current.system;
  byId("api-key").value = apiKey();
  for (const [name, value] of Object.entries(settings)) {
    if (name === "transport") dialog.querySelector(`[name=transport][value=${value}]`).checked = true;
    else byId(name).value = value;
    showRange(name);
  }
  dialog.showModal();
  if (focusOn) byId(focusOn).focus();
}

function showRange(name) {
  const shown = byId(`${name}-shown`);
  if (shown) shown.textContent = Number(byId(name).value).toFixed(2);
}

function takeSettings() {
  for (const name of Object.keys(settings)) {
    if (name === "transport") settings[name] = dialog.querySelector("[name=transport]:checked").value;
    else if (name === "stop_strings") settings[name] = byId(name).value;
    else if (!byId(name).validity.valid) continue;
    else settings[name] = byId(name).value === "" ? (typeof DEFAULTS[name] === "number" && name !== "max_tokens" ? DEFAULTS[name] : "") : Number(byId(name).value);
  }
  write(SETTINGS, JSON.stringify(settings));
  current.system = byId("system").value;
  keep(current);
  const key = byId("api-key").value.trim();
  if (key !== apiKey()) {
    setApiKey(key);
    client.apiKey = key;
    watchServer();
  }
}

byId("open-settings").addEventListener("click", () => openSettings());
byId("settings-form").addEventListener("input", ({ target }) => showRange(target.id));
byId("settings-form").noValidate = true;
dialog.addEventListener("close", takeSettings);
dialog.addEventListener("click", ({ target }) => { if (target === dialog) dialog.close(); });
byId("reset-settings").addEventListener("click", () => {
  for (const [name, value] of Object.entries(DEFAULTS)) {
    if (name !== "transport") byId(name).value = value;
    showRange(name);
  }
});

function showKeyNeeded(isNeeded) {
  byId("key-needed").hidden = !isNeeded;
}
byId("enter-key").addEventListener("click", () => openSettings("api-key"));

// The server

let watchTimer = 0;
let modelName = "";

function showState(state, text) {
  byId("state").dataset.state = state;
  byId("state-text").textContent = text;
}

/** How far the server is, now and again: often while it loads, seldom when it is ready. */
async function watchServer() {
  clearTimeout(watchTimer);
  let againS = 15;
  try {
    const { ready, status, stage, percent } = await client.ready();
    byId("loading").hidden = ready;
    if (ready) {
      await readModel();
    } else {
      againS = 0.5;
      showState("loading", `${Math.round(percent)} %`);
      const what = stage ? stage[0].toUpperCase() + stage.slice(1) : status;
      byId("loading-text").textContent = `The model is not ready: ${what}, ${Math.round(percent)} %`;
      byId("loading-bar").value = percent;
    }
  } catch (error) {
    againS = 2;
    byId("loading").hidden = true;
    showState("lost", error.status === 401 ? "API key needed" : "Not reachable");
    showKeyNeeded(error.status === 401);
    if (error.status === 401) againS = 30;
  }
  clearTimeout(watchTimer);
  watchTimer = setTimeout(watchServer, againS * 1000);
}

async function readModel() {
  const [model] = await client.models();
  showKeyNeeded(false);
  modelName = model?.id ?? "";
  showState("ready", modelName || "Ready");
  byId("empty-model").textContent = model ? `${modelName}, with a context of ${number(model.max_model_len)} tokens` : "";
}

byId("ideas").append(...IDEAS.map((text) => {
  const button = element("button", { type: "button" }, text);
  button.addEventListener("click", () => {
    prompt.value = text;
    submit();
    prompt.focus();
  });
  return element("li", {}, button);
}));

addEventListener("pagehide", () => {
  for (const run of runs.values()) run.save();
  keep(current);
});
document.addEventListener("visibilitychange", () => {
  for (const run of runs.values()) run.save();
  if (!document.hidden) watchServer();
});
addEventListener("online", watchServer);
onOtherTab((id, chat) => {
  const known = chats.find((other) => other.id === id);
  if (runs.has(id)) return;
  if (chat === null) {
    if (known) forget(known);
  } else if (known) {
    chats[chats.indexOf(known)] = chat;
    if (known === current) {
      const draft = prompt.value;
      show(chat, { keepsFocus: true });
      prompt.value = draft;
      fitPrompt();
    } else showChats();
  } else {
    chats.unshift(chat);
    showChats();
  }
  if (chat !== null) takeUp(chat);
});

for (const chat of chats) takeUp(chat);
show(current);
watchServer();
