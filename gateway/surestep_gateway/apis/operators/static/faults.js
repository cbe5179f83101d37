// What went wrong: lost epochs, as schedulers report them, and times without their answers.

import { h } from "./dom.js";
import { ago, cause, seconds, several } from "./words.js";

const SHOWN = 12;

/** All faults of all schedulers, newest first: { age, what, how, open, where }. */
export function faultsOf(schedulers) {
  const found = schedulers.flatMap((scheduler) => [...lostEpochs(scheduler), ...outages(scheduler)]);
  return found.sort((a, b) => a.age - b.age);
}

function lostEpochs({ address, engine }) {
  return (engine?.incidents ?? []).map((incident) => ({
    age: incident.age_s,
    begin: incident.age_s + incident.detect_s,
    end: incident.recover_s === null ? 0 : Math.max(0, incident.age_s - incident.recover_s),
    open: incident.recover_s === null,
    key: `${address} epoch ${incident.epoch}`,
    what: cause(incident.cause),
    how: `Epoch ${incident.epoch}: ${incident.reason}. Noticed after ${seconds(incident.detect_s)}, ${
      incident.recover_s === null ? "not over yet" : `serving again after ${seconds(incident.recover_s)}`
    }; ${replayed(incident.replayed_requests)}.`,
    where: address,
  }));
}

function replayed(requests) {
  if (requests === 0) return "no request was under way";
  return `${several(requests, "request")} went on from where ${requests === 1 ? "it was" : "they were"}`;
}

function outages({ address, outages: list }) {
  return list.map((outage) => ({
    age: outage.age_s,
    begin: outage.age_s,
    end: outage.seconds === null ? 0 : Math.max(0, outage.age_s - outage.seconds),
    open: outage.seconds === null,
    key: `${address} away`,
    what: "The scheduler did not answer",
    how: outage.seconds === null ? "It does not answer yet." : `It was back after ${seconds(outage.seconds)}.`,
    where: address,
  }));
}

/** Spans of time for pictures: [age of the beginning, age of the end]. */
export const bands = (scheduler) => faultsOf([scheduler]).map(({ begin, end }) => [begin, end]);

/** The list. */
export function faultList(schedulers) {
  const faults = faultsOf(schedulers);
  if (faults.length === 0) return h("p", { class: "note" }, "None since the schedulers were started.");
  const more = faults.length - SHOWN;
  return [
    h("ol", { class: "faults" }, faults.slice(0, SHOWN).map((fault) => item(fault, schedulers.length > 1))),
    more > 0 && h("p", { class: "note" }, `and ${more} before.`),
  ];
}

function item(fault, several) {
  return h(
    "li",
    {},
    h("span", { class: "when" }, ago(fault.age)),
    h(
      "div",
      {},
      h("p", { class: fault.open ? "what open" : "what" }, several ? `${fault.what} (${fault.where})` : fault.what),
      h("p", { class: "how" }, fault.how),
    ),
  );
}
