// Small pictures. Each stands beside its numbers, or has a table of them; none is the only source.

import { h, s } from "./dom.js";
import { seconds } from "./words.js";

export const HISTORY_S = 180; // that the server remembers
const MAX_GAP_S = 4; // between two samples that a line may join

/** A line of values over the last `span` seconds. `points` are [age in seconds, value or null],
 * oldest first, `bands` [age of the beginning, age of the end] of what went wrong, `most` the top. */
export function line(points, bands, { most, span = HISTORY_S, height = 28, kind = "spark" }) {
  const width = 360;
  const x = (age) => (width * (1 - Math.min(age, span) / span)).toFixed(1);
  const y = (value) => (height - 1 - (height - 3) * Math.min(1, value / (most || 1))).toFixed(1);
  const lines = runs(points.filter(([age]) => age <= span));
  const drawn = (run) => (run.length > 1 ? run : [[run[0][0] + 1, run[0][1]], run[0]]); // a second wide
  const path = (run) => drawn(run).map(([age, value], i) => `${i ? "L" : "M"}${x(age)} ${y(value)}`).join("");
  const area = (run) => `${path(run)}L${x(run.at(-1)[0])} ${height}L${x(drawn(run)[0][0])} ${height}Z`;
  return s(
    "svg",
    { class: kind, viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    s("path", { class: "area", d: lines.map(area).join("") || "M0 0" }),
    bands.filter(([, end]) => end < span).map(([begin, end]) => {
      const left = x(begin);
      const wide = Math.max(2, x(end) - left);
      return s("rect", { class: "band", x: left, y: 0, width: wide, height });
    }),
    s("path", { class: "line", d: lines.map(path).join("") || "M0 0" }),
  );
}

/** A line with its axes: from 0 to a round figure with its unit, and the time. */
export function plot(points, bands, { most, span, unit }) {
  const top = round(most ?? Math.max(0, ...points.map(([, value]) => value)));
  return h(
    "div",
    { class: "plot", "aria-hidden": "true" },
    h("p", { class: "most" }, unit(top)),
    h("p", { class: "zero" }, "0"),
    line(points, bands, { most: top, span }),
    h("p", { class: "axis" }, h("span", {}, `${seconds(span)} ago`), h("span", {}, "now")),
  );
}

/** The next 1, 2 or 5 of a power of ten, for the top of an axis. */
function round(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((digit) => digit * power).find((top) => top >= value * 0.9999);
}

/** Parts of a line without holes. */
function runs(points) {
  const found = [];
  let before = Infinity;
  for (const [age, value] of points) {
    if (value === null) before = Infinity;
    else {
      if (before - age > MAX_GAP_S) found.push([]);
      found.at(-1).push([age, value]);
      before = age;
    }
  }
  return found;
}

/** A table whose rows have a bar each. `rows` are { label, value, text }, of which `most` fills the
 * whole width. */
export function bars(caption, rows, most, heads) {
  return h(
    "table",
    { class: "bars" },
    h("caption", { class: "unseen" }, caption),
    h("thead", { class: "unseen" }, h("tr", {}, h("th", { scope: "col" }, heads[0]), h("td"), h("th", { scope: "col" }, heads[1]))),
    h(
      "tbody",
      {},
      rows.map(({ label, value, text }) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, label),
          h("td", {}, bar(most > 0 ? value / most : 0)),
          h("td", { class: "number" }, text),
        ),
      ),
    ),
  );
}

/** A bar that is filled up to a share, 0 to 1. */
export function bar(share) {
  const wide = (100 * Math.max(0, Math.min(1, share))).toFixed(2);
  return s(
    "svg",
    { class: "bar", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { class: "track", width: 100, height: 10 }),
    s("rect", { class: "fill", width: wide, height: 10 }),
  );
}

/** One lane of a timeline: a block for each step, as wide as it took, as high as it had rows. */
export function lane(steps, rows, most, windowS, kind = "") {
  const width = 1000;
  const height = 24;
  const x = (age) => width * (1 - age / windowS);
  const blocks = steps
    .filter((step) => rows(step) > 0)
    .map((step) => {
      const right = Math.min(width, x(step.age));
      const begin = Math.max(0, x(step.age + step.took));
      const left = Math.min(right - 1.5, begin + Math.min(1, 0.2 * (right - begin))); // a gap to the one before
      const high = 3 + (height - 3) * (rows(step) / most);
      return `M${left.toFixed(1)} ${height}V${(height - high).toFixed(1)}H${right.toFixed(1)}V${height}Z`;
    });
  return frame(`lane ${kind}`, width, height, s("path", { d: blocks.join("") || "M0 0" }));
}

/** The lane of what went wrong. */
export function faultLane(bands, windowS) {
  const width = 1000;
  const marks = bands
    .filter(([, end]) => end < windowS)
    .map(([begin, end]) => {
      const left = width * (1 - Math.min(begin, windowS) / windowS);
      const wide = Math.max(4, width * (1 - end / windowS) - left);
      return s("rect", { class: "mark", x: left.toFixed(1), y: 0, width: wide.toFixed(1), height: 24 });
    });
  return frame("lane", width, 24, marks);
}

function frame(kind, width, height, ...inside) {
  const box = `0 0 ${width} ${height}`;
  return s("svg", { class: kind.trim(), viewBox: box, preserveAspectRatio: "none", "aria-hidden": "true" }, inside);
}
