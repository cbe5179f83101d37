// What clients see, as the gateway measures it: latencies, errors and refusals.

import { plot } from "./charts.js";
import { h } from "./dom.js";
import { bands } from "./faults.js";
import { LEAST_S, tile } from "./now.js";
import { count, failures, seconds, several } from "./words.js";

const LATENCIES = [
  ["First token", "first_token"],
  ["Between tokens", "inter_token"],
  ["In the queue", "queue"],
];

/** The tiles: figures of the last minute, with pictures of three. */
export function clientTiles({ clients, schedulers }) {
  const red = schedulers.flatMap(bands);
  const span = Math.max(LEAST_S, clients.age_s[0] ?? 0);
  const picture = (values, unit) => plot(clients.age_s.map((age, i) => [age, values[i]]), red, { span, unit });
  const failed = failures(clients);
  return h(
    "dl",
    { class: "tiles" },
    LATENCIES.map(([name, field]) => latency(name, clients[field], picture)),
    tile("Errors", count(failed), `of ${several(clients.answers, "answer")}`, errorText(clients, failed),
      picture(clients.history_failed, (top) => `${count(top)}/s`), failed > 0),
    tile("Refused", count(clients.refused), "with 429", "in the last minute", picture(clients.history_refused, (top) => `${count(top)}/s`)),
  );
}

function latency(name, { p50_s, p95_s, history_p95_s }, picture) {
  const [value, more] = p50_s === null ? ["–", "none in the last minute"] : [seconds(p50_s), `p95 ${seconds(p95_s)}`];
  return tile(name, value, p50_s === null ? "" : "p50", more, picture(history_p95_s, (top) => seconds(top)));
}

function errorText({ failed, failed_in_streams, client_gone }, number) {
  if (number === 0) return client_gone ? `${several(client_gone, "client")} left early` : "in the last minute";
  const codes = Object.entries(failed).sort((a, b) => b[1] - a[1]).map(([code, times]) => `${code} ${count(times)}`);
  return `${codes.join(", ")}${failed_in_streams ? `; ${count(failed_in_streams)} inside streams` : ""}`;
}
