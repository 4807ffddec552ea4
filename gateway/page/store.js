/** The chats, in this browser's storage, each under a name of its own. */

import { read, write } from "./theme.js";

const PREFIX = "streamkv.chat.";

export const newId = () => crypto.getRandomValues(new Uint32Array(4)).reduce((text, part) => text + part.toString(36), "");

/** Which tab this is; the same after a reload. */
export const tabId = (() => {
  try {
    return (sessionStorage["streamkv.tab"] ??= newId());
  } catch {
    return newId();
  }
})();

export function newChat() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, system: "", draft: "", messages: [] };
}

function parse(text) {
  try {
    const chat = JSON.parse(text);
    return chat && typeof chat.id === "string" && Array.isArray(chat.messages) ? chat : null;
  } catch {
    return null;
  }
}

/** Every chat, the one that was last used first. */
export function loadChats() {
  let names = [];
  try {
    names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  } catch { /* storage is forbidden: chats live as long as the page */ }
  return names.map((name) => parse(read(name))).filter(Boolean).sort((a, b) => b.updated - a.updated);
}

/** Returns whether there was room. */
export const saveChat = (chat) => write(PREFIX + chat.id, JSON.stringify(chat));

export const deleteChat = (chat) => write(PREFIX + chat.id, null);

/** Calls back with (id, chat or null) when another tab changes one. */
export function onOtherTab(callback) {
  addEventListener("storage", ({ key, newValue }) => {
    if (key?.startsWith(PREFIX)) callback(key.slice(PREFIX.length), newValue === null ? null : parse(newValue));
  });
}

/** Hand out data as a file. */
export function download(name, data) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(data, null, 2)], { type: "application/json" }));
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
