// A subset of Markdown as elements: headings, lists, quotes, code, tables, emphasis and links. HTML is
// text, pictures are links and never loaded, links lead to the web or to mail. Time is linear in the
// length of the text, whatever it says.

import { h } from "./dom.js";

const LONGEST = 2048; // characters of a link's text, and of its address
const BREAK = /^<br ?\/?>/i; // what models write in cells of tables
const MOST_DEEP = 8; // quotes in lists in quotes; deeper ones stay as they are written
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?: {1,4}|\t|$)/;
const HEADS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const BLANK = /^\s*$/;
const TARGET = /^\(((?:[^\s<>()]|\([^\s<>()]*\))*)(?:[ \t]+"[^"]*")?\)/;
const ADDRESS = /https?:\/\/[^\s<>"'`|\])]*[^\s<>"'`|\]).,:;!?*_~]/y;
const SPECIAL = /[\\`*_~[!<h]/g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const EMPHASIS = { "**": "strong", __: "strong", "~~": "del", "*": "em", _: "em" };
const SCHEMES = ["http:", "https:", "mailto:"];

/** Text, with a mark for each of its characters; equal neighbours share a span of that class. */
export class Marked {
  constructor(text, marks) {
    this.text = text;
    this.marks = marks;
  }

  slice(begin, end) {
    return new Marked(this.text.slice(begin, end), this.marks.slice(begin, end));
  }

  /** Its lines. */
  lines() {
    const found = [];
    let begin = 0;
    for (const line of this.text.split("\n")) {
      found.push(this.slice(begin, begin + line.length));
      begin += line.length + 1;
    }
    return found;
  }

  static join(lines) {
    return new Marked(lines.map((one) => one.text).join("\n"), lines.map((one) => one.marks).join(" "));
  }

  /** Spans, one for each run of a mark: "d" was drafted. */
  spans() {
    const found = [];
    for (let begin = 0; begin < this.text.length; ) {
      let end = begin + 1;
      while (end < this.text.length && (this.marks[end] === this.marks[begin] || this.marks[end] === " ")) end += 1;
      found.push(h("span", this.marks[begin] === "d" ? { class: "drafted" } : {}, this.text.slice(begin, end)));
      begin = end;
    }
    return found;
  }
}

/** The elements of a text. */
export const markdown = (source) => blocks(source.lines(), 0);

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const { text } = lines[at];
    let end = at + 1;
    if (BLANK.test(text)) {
      // between blocks
    } else if (FENCE.test(text)) {
      end = fenceEnd(lines, at);
      const closed = end > at + 1 && isFenceEnd(lines[end - 1].text, FENCE.exec(text)[1]);
      const inside = Marked.join(lines.slice(at + 1, closed ? end - 1 : end));
      found.push(h("pre", { tabindex: "0" }, h("code", {}, inside.spans())));
    } else if (HEADING.test(text)) {
      const [mark, { length }] = HEADING.exec(text);
      const inside = lines[at].slice(mark.length, text.trimEnd().length);
      found.push(h(`h${Math.min(6, 3 + length)}`, {}, inline(inside, depth)));
    } else if (RULE.test(text)) {
      found.push(h("hr"));
    } else if (QUOTE.test(text) && depth < MOST_DEEP) {
      while (end < lines.length && QUOTE.test(lines[end].text)) end += 1;
      const inside = lines.slice(at, end).map((line) => line.slice(QUOTE.exec(line.text)[0].length));
      found.push(h("blockquote", {}, blocks(inside, depth + 1)));
    } else if (ITEM.test(text) && depth < MOST_DEEP) {
      end = list(lines, at, depth, found);
    } else if (isTable(lines, at)) {
      while (end < lines.length && lines[end].text.includes("|")) end += 1;
      found.push(table(lines.slice(at, end), depth));
    } else {
      while (end < lines.length && !interrupts(lines, end)) end += 1;
      found.push(h("p", {}, inline(Marked.join(lines.slice(at, end)), depth)));
    }
    at = end;
  }
  return found;
}

const isFenceEnd = (text, mark) => text.trim().length >= mark.length && text.trim() === mark[0].repeat(text.trim().length);

/** The line behind a block of code; one that is not closed yet goes on to the end. */
function fenceEnd(lines, at) {
  const mark = FENCE.exec(lines[at].text)[1];
  let end = at + 1;
  while (end < lines.length && !isFenceEnd(lines[end].text, mark)) end += 1;
  return Math.min(end + 1, lines.length);
}

/** Whether a paragraph ends before a line. */
function interrupts(lines, at) {
  const { text } = lines[at];
  const item = ITEM.exec(text);
  const begins = item && (!/\d/.test(item[2]) || item[2].length === 2); // "1984. A year" goes on
  return BLANK.test(text) || FENCE.test(text) || HEADING.test(text) || RULE.test(text) || QUOTE.test(text) || begins || isTable(lines, at);
}

const isTable = (lines, at) =>
  lines[at].text.includes("|") && at + 1 < lines.length && lines[at + 1].text.includes("-") &&
  lines[at + 1].text.includes("|") && HEADS.test(lines[at + 1].text);

const indent = (text) => text.length - text.trimStart().length;

/** Add a list, and return the line behind it. */
function list(lines, at, depth, found) {
  const start = Number.parseInt(ITEM.exec(lines[at].text)[2], 10); // NaN of bullets
  const items = [];
  while (at < lines.length) {
    const item = ITEM.exec(lines[at].text);
    if (!item || /\d/.test(item[2]) !== start >= 0 || RULE.test(lines[at].text)) break;
    const [{ length: width }] = item;
    const inside = [lines[at].slice(width)];
    for (at += 1; at < lines.length && belongs(lines, at, width); at += 1) {
      inside.push(lines[at].slice(Math.min(width, indent(lines[at].text))));
    }
    const [first, ...rest] = blocks(inside, depth + 1);
    const tight = first?.nodeName === "P" && !inside.some((line) => BLANK.test(line.text));
    items.push(h("li", {}, tight ? [...first.childNodes] : first, rest));
    let behind = at; // blank lines, which a list may have between its items
    while (behind < lines.length && BLANK.test(lines[behind].text)) behind += 1;
    if (behind < lines.length && ITEM.test(lines[behind].text)) at = behind;
  }
  found.push(start >= 0 ? h("ol", { start: start === 1 ? null : start }, items) : h("ul", {}, items));
  return at;
}

/** Whether a line goes on with an item: it is indented, or a blank one before such, or plain text. */
function belongs(lines, at, width) {
  const { text } = lines[at];
  if (BLANK.test(text)) return at + 1 < lines.length && !BLANK.test(lines[at + 1].text) && indent(lines[at + 1].text) >= Math.min(width, 2);
  return indent(text) >= Math.min(width, 2) || !(BLANK.test(lines[at - 1].text) || ITEM.test(text) || interrupts(lines, at));
}

function table([heads, , ...rows], depth) {
  const row = (line, tag) => h("tr", {}, cells(line).map((cell) => h(tag, tag === "th" ? { scope: "col" } : {}, inline(cell, depth))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row(heads, "th")), h("tbody", {}, rows.map((line) => row(line, "td")))));
}

function cells(line) {
  const found = [];
  let begin = 0;
  for (let at = 0; at <= line.text.length; at += 1) {
    if (line.text[at] === "\\") at += 1;
    else if (at === line.text.length || line.text[at] === "|") {
      found.push(line.slice(begin, at));
      begin = at + 1;
    }
  }
  if (BLANK.test(found[0].text)) found.shift();
  if (found.length && BLANK.test(found.at(-1).text)) found.pop();
  return found.map((cell) => cell.slice(indent(cell.text), cell.text.trimEnd().length));
}

/** Texts, emphasis, code and links within a block. */
function inline(piece, depth) {
  const { text } = piece;
  const found = [];
  const missing = new Set(); // ends that are nowhere from here on
  let plain = 0; // where what is not added yet begins
  const add = (begin, end, ...nodes) => {
    found.push(...piece.slice(plain, begin).spans(), ...nodes);
    plain = end;
    SPECIAL.lastIndex = end;
  };
  for (let at = next(text, 0); at >= 0; at = next(text, Math.max(at + 1, plain))) {
    const made = depth < MOST_DEEP ? special(piece, at, depth, missing) : null;
    if (made) add(at, made.end, ...made.nodes);
    else if (/[`*_~]/.test(text[at])) while (text[at + 1] === text[at]) at += 1; // a run that is text
  }
  found.push(...piece.slice(plain, text.length).spans());
  return found;
}

function next(text, from) {
  SPECIAL.lastIndex = from;
  return SPECIAL.exec(text)?.index ?? -1;
}

/** What begins at a character that may mean something: { nodes, end }, or null for text. */
function special(piece, at, depth, missing) {
  const { text } = piece;
  switch (text[at]) {
    case "\\":
      if (!PUNCTUATION.test(text[at + 1] ?? "")) return null;
      return { nodes: piece.slice(at + 1, at + 2).spans(), end: at + 2 };
    case "`":
      return code(piece, at, missing);
    case "[":
      return link(piece, at, at);
    case "!":
      return text[at + 1] === "[" ? link(piece, at, at + 1) : null;
    case "<":
      if (BREAK.test(text.slice(at, at + 6))) return { nodes: [h("br")], end: text.indexOf(">", at) + 1 };
      return address(piece, at);
    case "h":
      return address(piece, at);
    default:
      return emphasis(piece, at, depth, missing);
  }
}

function code(piece, at, missing) {
  const { text } = piece;
  const mark = /^`+/.exec(text.slice(at, at + 64))[0];
  if (missing.has(mark)) return null;
  for (let end = text.indexOf(mark, at + mark.length); end >= 0; end = text.indexOf(mark, end)) {
    let behind = end;
    while (text[behind] === "`") behind += 1;
    if (behind - end === mark.length) return { nodes: [h("code", {}, piece.slice(at + mark.length, end).spans())], end: behind };
    end = behind;
  }
  missing.add(mark);
  return null;
}

function emphasis(piece, at, depth, missing) {
  const { text } = piece;
  const one = text[at];
  const mark = text[at + 1] === one ? one + one : one;
  const begin = at + mark.length;
  if (!EMPHASIS[mark] || missing.has(mark) || /^\s?$/.test(text[begin] ?? "")) return null;
  if (one === "_" && WORD.test(text[at - 1] ?? "")) return null;
  for (let end = text.indexOf(mark, begin + 1), behind; end >= 0; end = text.indexOf(mark, behind)) {
    for (behind = end; text[behind] === one; ) behind += 1;
    if (mark.length === 1 && behind - end === 2) continue; // an end of the other kind
    const last = behind - mark.length;
    if (/\s/.test(text[last - 1]) || (one === "_" && WORD.test(text[behind] ?? ""))) continue;
    return { nodes: [h(EMPHASIS[mark], {}, inline(piece.slice(begin, last), depth + 1))], end: behind };
  }
  missing.add(mark);
  return null;
}

/** [text](address); a picture, whose text begins one later, is a link as well. */
function link(piece, at, bracket) {
  const { text } = piece;
  const middle = bracket + text.slice(bracket, bracket + LONGEST).indexOf("](");
  if (middle < bracket || text.slice(bracket + 1, middle).includes("[")) return null;
  const target = TARGET.exec(text.slice(middle + 1, middle + LONGEST));
  const href = target && safe(target[1]);
  if (!href) return null;
  const begin = middle === bracket + 1 ? middle + 2 : bracket + 1; // without a text its address
  const end = middle === bracket + 1 ? begin + target[1].length : middle;
  return { nodes: [anchor(href, piece.slice(begin, end).spans())], end: middle + 1 + target[0].length };
}

function address(piece, at) {
  const { text } = piece;
  const begin = text[at] === "<" ? at + 1 : at;
  ADDRESS.lastIndex = begin;
  const [found] = ADDRESS.exec(text) ?? [];
  const href = found && safe(found);
  if (!href || (begin === at && WORD.test(text[at - 1] ?? ""))) return null;
  const end = begin + found.length;
  if (begin > at && text[end] !== ">") return null;
  return { nodes: [anchor(href, piece.slice(begin, end).spans())], end: begin > at ? end + 1 : end };
}

const anchor = (href, nodes) => h("a", { href, target: "_blank", rel: "noopener noreferrer nofollow", title: href }, nodes);

/** An address that a browser only ever opens; null for others, such as scripts and data. */
function safe(written) {
  try {
    const { href, protocol } = new URL(written);
    return SCHEMES.includes(protocol) ? href : null;
  } catch {
    return null;
  }
}
