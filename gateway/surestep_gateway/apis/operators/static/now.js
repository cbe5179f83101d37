// The figures of all schedulers together.

import { plot } from "./charts.js";
import { h } from "./dom.js";
import { bands } from "./faults.js";
import { count, percent, rate, seconds, several } from "./words.js";

export const LEAST_S = 30; // that pictures show
const STALE_S = 4; // older figures are none
const SUMMED = ["output_tok_s", "prompt_tok_s", "running", "waiting", "steps_s"];

/** The histories of several schedulers as one: for each second ago the sum, or the mean. */
export function together(schedulers) {
  const seconds_ = new Map();
  for (const { history } of schedulers) {
    history.age_s.forEach((age, i) => {
      const second = Math.round(age);
      const slot = seconds_.get(second) ?? { age, kv: [], accepted: [] };
      for (const name of SUMMED) slot[name] = (slot[name] ?? 0) + history[name][i];
      slot.kv.push(history.kv_usage[i]);
      if (history.accepted[i] !== null) slot.accepted.push(history.accepted[i]);
      seconds_.set(second, slot);
    });
  }
  return [...seconds_.values()].sort((a, b) => b.age - a.age);
}

const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const sum = (schedulers, name) => schedulers.reduce((total, { figures }) => total + figures[name], 0);

/** The tiles. */
export function tiles(overview) {
  const { schedulers } = overview;
  const history = together(schedulers);
  const last = history.at(-1)?.age < STALE_S ? history.at(-1) : {};
  const here = schedulers.filter(({ engine }) => engine !== null); // what the others held is gone
  const red = schedulers.flatMap(bands);
  const span = Math.max(LEAST_S, history[0]?.age ?? 0);
  const picture = (value, unit, most) => plot(history.map((one) => [one.age, value(one)]), red, { span, most, unit });
  const speed = (top) => `${rate(top)} tok/s`;
  const used = sum(here, "kv_blocks_used");
  const cached = sum(here, "kv_blocks_cached");
  const blocks = sum(here, "kv_blocks");
  const slow = Math.max(0, ...schedulers.map(({ figures }) => figures.step_p99_s));
  const usual = Math.max(0, ...schedulers.map(({ figures }) => figures.step_p50_s));
  return h(
    "dl",
    { class: "tiles" },
    tile("Output", rate(last.output_tok_s ?? 0), "tokens/s", `${count(sum(schedulers, "output_tokens"))} in all`, picture((one) => one.output_tok_s, speed)),
    tile("Prompts", rate(last.prompt_tok_s ?? 0), "tokens/s", `${count(sum(schedulers, "prompt_tokens"))} in all`, picture((one) => one.prompt_tok_s, speed)),
    tile("Requests", count(sum(here, "running")), "running", `${count(sum(here, "waiting"))} waiting`, picture((one) => one.running + one.waiting, (top) => several(top, "request"))),
    tile("KV cache", blocks ? percent(used / blocks) : "–", "used", blocks ? `${percent(cached / blocks)} kept for reuse` : "", picture((one) => mean(one.kv), percent, 1)),
    drafts(schedulers, history, picture),
    tile("Steps", rate(last.steps_s ?? 0), "per second", usual ? `${seconds(usual)}, p99 ${seconds(slow)}` : "", picture((one) => one.steps_s, (top) => `${rate(top)} steps/s`)),
  );
}

function drafts(schedulers, history, picture) {
  const drafted = sum(schedulers, "drafts");
  if (!schedulers.some(({ model }) => model?.drafter)) {
    return tile("Drafts", "off", "", "no drafter is configured", null);
  }
  const late = mean(history.map((one) => mean(one.accepted)).filter((share) => share !== null));
  const all = drafted ? `${percent(sum(schedulers, "accepted") / drafted)} since the start` : "none so far";
  return tile("Drafts", late === null ? "–" : percent(late), "accepted", all, picture((one) => mean(one.accepted), percent, 1));
}

/** A figure with what it means and how it was. */
export function tile(name, value, unit, more, picture, bad = false) {
  return h(
    "div",
    { class: bad ? "tile bad" : "tile" },
    h("dt", {}, name),
    h("dd", { class: "value" }, value, unit && h("small", {}, ` ${unit}`)),
    h("dd", { class: "more" }, more),
    h("dd", { class: "picture" }, picture),
  );
}
