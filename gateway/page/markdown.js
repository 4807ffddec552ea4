/**
 * Markdown to DOM nodes, for text that nobody vouches for: every piece of it becomes a text node, HTML in it stays text,
 * and a link goes to http, https or mailto only. Nothing is loaded: an image becomes a link.
 *
 * `MarkdownView` shows a text that grows: blocks that have not changed keep their nodes, so that a selection in them
 * and the time to show a token do not depend on the length of the answer.
 */

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)(?:[ \t]+#+)?[ \t]*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const TABLE_RULE = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MAX_DEPTH = 12; // of quotes and lists in each other; what is deeper is shown as a paragraph

/** The blocks of a text, each as the lines it is made of: { kind, lines, … }. */
export function blocksOf(text) {
  return splitLines(text.replace(/\r\n?/g, "\n").split("\n"));
}

function splitLines(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    let end = at + 1;
    let match;
    if (!line.trim()) {
      at = end;
      continue;
    }
    if ((match = FENCE.exec(line))) {
      const closer = new RegExp(`^ {0,3}${match[2][0] === "~" ? "~" : "`"}{${match[2].length},}[ \\t]*$`);
      while (end < lines.length && !closer.test(lines[end])) end++;
      const indent = new RegExp(`^ {0,${match[1].length}}`);
      const isClosed = end < lines.length;
      blocks.push({
        kind: "code", language: match[3], isClosed,
        lines: lines.slice(at + 1, end).map((inner) => inner.replace(indent, "")),
      });
      at = end + (isClosed ? 1 : 0);
      continue;
    }
    if ((match = HEADING.exec(line))) {
      blocks.push({ kind: "heading", level: match[1].length, lines: [match[2]] });
    } else if (RULE.test(line)) {
      blocks.push({ kind: "rule", lines: [line] });
    } else if (QUOTE.test(line)) {
      while (end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || !beginsBlock(lines[end]))) end++;
      blocks.push({ kind: "quote", lines: lines.slice(at, end).map((inner) => inner.replace(QUOTE, "")) });
    } else if ((match = ITEM.exec(line))) {
      end = endOfList(lines, at, match);
      blocks.push({ kind: "list", lines: lines.slice(at, end) });
    } else if (line.includes("|") && end < lines.length && TABLE_RULE.test(lines[end]) && lines[end].includes("-")
        && cells(line).length === cells(lines[end]).length) {
      while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end++;
      blocks.push({ kind: "table", lines: lines.slice(at, end) });
    } else {
      while (end < lines.length && lines[end].trim() && !beginsBlock(lines[end])) end++;
      blocks.push({ kind: "paragraph", lines: lines.slice(at, end) });
    }
    at = end;
  }
  return blocks;
}

/** Whether a line ends the paragraph before it. A number does so only as 1, since a year may begin a line. */
function beginsBlock(line) {
  const item = ITEM.exec(line);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)
    || (item !== null && line.trim() !== item[2] && (!/\d/.test(item[2]) || /^1[.)]/.test(item[2])));
}

const isOrdered = (marker) => /\d/.test(marker);

function endOfList(lines, start, first) {
  const indent = first[1].length;
  let end = start + 1;
  for (; end < lines.length; end++) {
    const line = lines[end];
    if (!line.trim()) {
      let next = end + 1;
      while (next < lines.length && !lines[next].trim()) next++;
      const follows = next < lines.length && (/^ {2,}|^\t/.test(lines[next]) || isSibling(lines[next], first));
      if (!follows) break;
      continue;
    }
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent && !isSibling(line, first)) break;
    if (!item && !/^ {2,}|^\t/.test(line) && beginsBlock(line)) break;
    if (RULE.test(line) && !/^ {2,}/.test(line)) break;
  }
  return end;
}

function isSibling(line, first) {
  const item = ITEM.exec(line);
  return item !== null && !RULE.test(line) && isOrdered(item[2]) === isOrdered(first[2]);
}

function itemsOf(lines) {
  const first = ITEM.exec(lines[0]);
  const items = [];
  let width = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= first[1].length + 1 && (!items.length || item[1].length < width)) {
      width = Math.min(item[0].length, item[1].length + item[2].length + 4) || item[0].length;
      items.push([line.slice(item[0].length)]);
    } else {
      const numSpaces = /^ */.exec(line.replace(/\t/g, "    "))[0].length;
      items.at(-1).push(line.replace(/\t/g, "    ").slice(Math.min(numSpaces, width)));
    }
  }
  return { isNumbered: isOrdered(first[2]), start: Number.parseInt(first[2], 10), items };
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replace(/\\\|/g, "|"));
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function blockNode(block, depth) {
  switch (block.kind) {
    case "code":
      return codeNode(block);
    case "heading":
      return element(`h${Math.min(6, block.level + 2)}`, { dir: "auto" }, ...inline(block.lines[0]));
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", { dir: "auto" }, ...nodes(block.lines, depth + 1));
    case "list":
      return listNode(block, depth);
    case "table":
      return tableNode(block);
    default:
      return element("p", { dir: "auto" }, ...inline(block.lines.map((line) => line.trimStart()).join("\n")));
  }
}

function nodes(lines, depth) {
  if (depth > MAX_DEPTH) return [element("p", { dir: "auto" }, lines.join("\n"))];
  return splitLines(lines).map((block) => blockNode(block, depth));
}

function codeNode(block) {
  const text = block.lines.join("\n");
  const label = block.language || "text";
  const copy = element("button", { type: "button", className: "copy-code", ariaLabel: `Copy ${label} code` }, "Copy");
  copy.addEventListener("click", () => copyText(text, copy));
  const head = element("div", { className: "code-head" }, element("span", {}, label), copy);
  const body = element("pre", { dir: "ltr", tabIndex: 0 }, element("code", {}, ...highlighted(text, block.language)));
  return element("div", { className: "code" }, head, body);
}

/** Put a text on the clipboard, and say so on the button for a moment. */
export async function copyText(text, button) {
  const label = button.dataset.label ??= button.textContent;
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copyBySelection(text);
  }
  button.textContent = done ? "Copied" : "Copying failed";
  setTimeout(() => { button.textContent = label; }, 1500);
}

/** The clipboard's API is there on https and localhost only. */
function copyBySelection(text) {
  const area = element("textarea", { value: text, className: "visually-hidden" });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

const WORDS = new Set(("and as async await break case catch class const continue def default del do elif else enum export "
  + "extends false False finally fn for from func function global if impl import in interface is lambda let match mod "
  + "module mut namespace new nil None not null or package pass private pub public raise return self static struct super "
  + "switch this throw true True try type typeof union use using var void while with yield select where insert update "
  + "delete create table SELECT FROM WHERE INSERT UPDATE DELETE CREATE TABLE JOIN ON AND OR NOT NULL ORDER BY GROUP "
  + "echo then fi done").split(" "));
const HASH_COMMENTS = /^(py|python|sh|bash|shell|zsh|rb|ruby|yaml|yml|toml|r|perl|make|makefile|dockerfile|elixir|nix)$/i;
const PLAIN = /^(|text|txt|plain|plaintext|markdown|md|output|console|log)$/i;
const MAX_HIGHLIGHTED = 20000; // characters

/** Colour for strings, comments, numbers and words that most languages have. A guess that never changes the text. */
function highlighted(text, language) {
  if (PLAIN.test(language) || text.length > MAX_HIGHLIGHTED) return [text];
  const comment = HASH_COMMENTS.test(language) ? "#.*" : language === "sql" || language === "lua" ? "--.*"
    : "\\/\\/.*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)|<!--[\\s\\S]*?(?:-->|$)";
  const pattern = new RegExp(`(${comment})|("(?:\\\\.|[^"\\\\\\n])*"?|'(?:\\\\.|[^'\\\\\\n])*'?|\`(?:\\\\.|[^\`\\\\])*\`?)`
    + "|\\b(\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b|([A-Za-z_$][\\w$]*)", "g");
  const found = [];
  let at = 0;
  for (const match of text.matchAll(pattern)) {
    const kind = match[1] !== undefined ? "comment" : match[2] !== undefined ? "string" : match[3] !== undefined ? "number"
      : WORDS.has(match[4]) ? "word" : "";
    if (!kind) continue;
    found.push(text.slice(at, match.index), element("span", { className: `code-${kind}` }, match[0]));
    at = match.index + match[0].length;
  }
  found.push(text.slice(at));
  return found;
}

function listNode(block, depth) {
  const { isNumbered, start, items } = itemsOf(block.lines);
  const list = element(isNumbered ? "ol" : "ul", { dir: "auto" });
  if (isNumbered && start !== 1) list.start = start;
  const isLoose = items.some((lines) => lines.slice(0, -1).some((line, at) => !line.trim() && lines[at + 1].trim()));
  for (const lines of items) {
    const task = /^\[([ xX])\][ \t]+/.exec(lines[0]);
    if (task) lines[0] = lines[0].slice(task[0].length);
    const inner = nodes(lines, depth + 1);
    const item = element("li");
    if (task) item.append(task[1] === " " ? "☐ " : "☑ ");
    for (const node of inner) {
      if (node.tagName === "P" && !isLoose) item.append(...node.childNodes);
      else item.append(node);
    }
    list.append(item);
  }
  return list;
}

function tableNode(block) {
  const [head, rule, ...rows] = block.lines.map(cells);
  const sides = rule.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : ""));
  const row = (values, name) => element("tr", {}, ...head.map((_, column) => {
    const cell = element(name, { dir: "auto" }, ...inline(values[column] ?? ""));
    if (name === "th") cell.scope = "col";
    if (sides[column]) cell.classList.add(`to-${sides[column]}`);
    return cell;
  }));
  const table = element("table", {}, element("thead", {}, row(head, "th")),
    element("tbody", {}, ...rows.map((values) => row(values, "td"))));
  return element("div", { className: "table", tabIndex: 0, role: "group", ariaLabel: "Table" }, table);
}

// Inside a block. What spans a piece of text is bounded, so that a text of many openers and no end takes no long time.
const INLINE = new RegExp([
  String.raw`\\([!-/:-@[-\x60{-~])`, // 1: escaped punctuation
  String.raw`(\x60+)(?!\x60)([\s\S]{0,2000}?[^\x60])\2(?!\x60)`, // 2, 3: code
  String.raw`!?\[((?:\\.|[^[\]\\]|\[[^[\]]{0,200}\]){0,1000})\]\(\s*<?((?:[^\s()<>]|\([^\s()]{0,500}\)){0,2000})>?(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)`, // 4, 5: link
  String.raw`<((?:https?:\/\/|mailto:)[^\s<>]+)>`, // 6: a link as it is
  String.raw`(https?:\/\/[^\s<>"'\x60\])]+[^\s<>"'\x60\]).,;:!?*_~])`, // 7: a bare one
  String.raw`(\*\*|(?<![\p{L}\p{N}])__)(?=\S)([\s\S]{0,2000}?\S)\8(?!\*)`, // 8, 9: bold
  String.raw`(?<![\p{L}\p{N}*_])([*_])(?=\S)([\s\S]{0,2000}?\S)\10(?![\p{L}\p{N}])`, // 10, 11: italic; 2*3*4 and snake_case_names are none
  String.raw`~~(?=\S)([\s\S]{0,2000}?\S)~~`, // 12: struck out
  String.raw`( {2,}|\\)\n`, // 13: a line that ends here
].join("|"), "gu");

/** The nodes of a line of text. */
export function inline(text, depth = 0) {
  const found = [];
  let at = 0;
  const upTo = (end) => { if (end > at) found.push(text.slice(at, end)); };
  for (const match of text.matchAll(INLINE)) {
    upTo(match.index);
    found.push(inlineNode(match, depth));
    at = match.index + match[0].length;
  }
  upTo(text.length);
  return found;
}

function inlineNode(match, depth) {
  const inner = (part) => (depth < MAX_DEPTH ? inline(part, depth + 1) : [part]);
  if (match[1] !== undefined) return match[1];
  if (match[2] !== undefined) return element("code", { dir: "ltr" }, match[3].replace(/^ (.+) $/s, "$1").replace(/\n/g, " "));
  if (match[4] !== undefined) return link(match[5], inner(match[4] || match[5]));
  if (match[6] !== undefined) return link(match[6], [match[6]]);
  if (match[7] !== undefined) return link(match[7], [match[7]]);
  if (match[8] !== undefined) return element("strong", {}, ...inner(match[9]));
  if (match[10] !== undefined) return element("em", {}, ...inner(match[11]));
  if (match[12] !== undefined) return element("del", {}, ...inner(match[12]));
  return element("br");
}

/** A link, or its bare text where it goes anywhere but to the web or to a mailbox. */
function link(href, children) {
  let url;
  try {
    url = new URL(href);
  } catch {
    return element("span", {}, ...children);
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return element("span", {}, ...children);
  return element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

/** A text as nodes, whole. */
export function markdown(text) {
  const fragment = document.createDocumentFragment();
  fragment.append(...blocksOf(text).map((block) => blockNode(block, 0)));
  return fragment;
}

/** Shows a growing text in an element. */
export class MarkdownView {
  constructor(root) {
    this._root = root;
    this._shown = [];
  }

  /** Show this text. Only blocks that differ from what is there are made anew. */
  update(text) {
    const blocks = blocksOf(text);
    const signatures = blocks.map((block) => `${block.kind}\n${block.language ?? ""}\n${block.level ?? ""}\n${block.lines.join("\n")}`);
    let same = 0;
    while (same < signatures.length && signatures[same] === this._shown[same]) same++;
    while (this._root.childNodes.length > same) this._root.lastChild.remove();
    this._root.append(...blocks.slice(same).map((block) => blockNode(block, 0)));
    this._shown = signatures;
  }
}
