// One route in full, in a dialog: what was found, decided, hinted, said by the backend, and seen by the client's side.

import { byId, h } from "./dom.js";
import * as f from "./format.js";
import { outcomeBadge } from "./tables.js";
import { DECISIONS, LOOKUPS, MODES, REASONS, word } from "./words.js";

export function startRoute() {
  byId("find").onsubmit = (event) => {
    event.preventDefault();
    const id = byId("find-id").value.trim();
    if (id) openFound(id);
  };
  byId("route-close").onclick = () => byId("route").close();
  byId("route").onclick = (event) => {
    if (event.target === byId("route")) byId("route").close();
  };
}

export const openRoute = (id) => open(`Route ${id}`, `/api/routes/${encodeURIComponent(id)}`, (route) => story(route));

/** By a route id, or by the id of a request as a user has it: then every attempt of it. */
export function openFound(id) {
  // A path that ends in dots alone is another path, and no id is made of dots.
  const asked = /^\.+$/.test(id) ? `${id}?` : id;
  return open(`Found for ${id}`, `/api/requests/${encodeURIComponent(asked)}`, ({ routes }) => attempts(id, routes));
}

async function open(title, path, render) {
  const dialog = byId("route");
  byId("route-title").textContent = title;
  const body = byId("route-body");
  body.replaceChildren(h("p", { class: "muted" }, "Reading…"));
  dialog.showModal();
  try {
    const answer = await fetch(path);
    const found = await answer.json();
    body.replaceChildren(...(answer.ok ? render(found) : [h("p", {}, found.error ?? `The router answered ${answer.status}.`)]));
  } catch (error) {
    body.replaceChildren(h("p", {}, `Not read: ${error.message}`));
  }
}

function attempts(id, routes) {
  if (routes.length === 0) return [h("p", {}, `No closed route of ${id}. A route closes when its report has come, or when the time for it is over; the record keeps the last ones only.`)];
  if (routes.length === 1) byId("route-title").textContent = `Route ${routes[0].route_id}`;
  return routes.flatMap((route) => [...(routes.length > 1 ? [h("h3", {}, `${route.requests > 1 ? `Request ${route.request} of ${route.requests} with this id, attempt` : "Attempt"} ${route.attempt}: route ${route.route_id}`)] : []), ...story(route)]);
}

function signals(opened) {
  const found = Object.entries(opened.quality_signals ?? {});
  return found.length ? ` The provider’s signals: ${found.map(([name, value]) => `${name} ${value}`).join(", ")}.` : "";
}

function story(route) {
  const { opened, observed, report, tokens } = route;
  const line = (name, ...text) => h("li", {}, h("b", {}, name), h("div", {}, ...text.map((part) => (part instanceof Node ? part : h("p", {}, part)))));
  const items = [
    line("Request", `${f.count(tokens.input)} prompt tokens for ${route.model}, at ${f.time(opened.opened_at)}${opened.request_id ? `, request ${opened.request_id}` : ""}, attempt ${route.attempt}.`, `Dynamo’s exact overlap: ${f.count(opened.exact_device_tokens)} tokens on device, ${f.count(opened.exact_host_tokens)} more in host memory.`),
    line("Evidence", `Lookup: ${word(LOOKUPS, opened.lookup).toLowerCase()} in ${f.seconds(opened.lookup_seconds)}.`, opened.donor_id ? `Donor ${opened.donor_id} (${opened.match_type ?? "unknown kind"}, overlap ${opened.overlap}, ${opened.tier ?? "unknown tier"}) by ${opened.provider ?? "an unknown provider"}: ${f.count(tokens.evidence)} tokens.${signals(opened)}` : opened.lookup === "hit" ? "What was found saves nothing beyond what its replica holds on the device, or sits where nobody may be sent." : "No donor."),
    line("Decision", `Mode ${route.mode}: ${word(MODES, route.mode)}.`, `${word(DECISIONS, route.decision)}${route.placed_on ? `, on ${route.placed_on}: ${f.count(tokens.placed)} tokens, of which ${f.count(tokens.hinted)} hinted${opened.expected_tokens == null ? "" : `; ${f.count(opened.expected_tokens)} tokens of prefill expected to be saved`}` : opened.shadow_choice ? `, on ${opened.shadow_choice}` : ""}.`),
    ...(opened.sheet?.length ? [line("Sheet", sheet(opened))] : []),
    line("Backend", ...backend(route, report)),
    line("Stream", ...stream(route, observed)),
  ];
  return [
    h("p", { class: "lead" }, outcomeBadge(route.outcome), " ", h("code", {}, route.reason), Object.hasOwn(REASONS, route.reason) ? ` ${REASONS[route.reason]}` : null),
    h("ol", { class: "story" }, ...items),
    h("details", {}, h("summary", {}, "As JSON"), h("pre", {}, JSON.stringify(route, null, 2))),
  ];
}

/** Expected tokens of prefill saved, by replica and by what they come from. */
function sheet({ sheet: lines, dynamo_choice: dynamo, sheet_rows: rows }) {
  const parts = ["device", "host", "disk", "donor", "load", "decode", "extra", "total"].filter((part) => part === "total" || lines.some((row) => row[part]));
  const note = (row) => [row.replica === dynamo ? "what Dynamo’s router would choose" : null, row.filtered_by ? `might not be chosen: ${row.filtered_by}` : null].filter(Boolean).join(", ");
  return h("div", { class: "table-box" }, h("table", { class: "sheet" },
    h("caption", {}, rows > lines.length ? `Tokens of prefill expected to be saved; ${f.count(rows - lines.length)} more replicas are not shown` : "Tokens of prefill expected to be saved"),
    h("thead", {}, h("tr", {}, h("th", {}, "Replica"), ...parts.map((part) => h("th", { class: "num" }, part)), h("th", {}, ""))),
    h("tbody", {}, ...lines.map((row) => h("tr", {}, h("td", {}, row.replica), ...parts.map((part) => h("td", { class: "num" }, f.count(row[part] ?? 0))), h("td", {}, note(row)))))));
}

function backend(route, report) {
  if (report === null) return ["No report: nothing is counted as reuse."];
  const said = [
    `${report.stable_routing_id}/${report.dp_rank} held ${f.count(report.local_tokens)} tokens itself. Offered ${f.count(report.offered)}, honoured ${f.count(report.honoured)}, copied ${f.count(report.copied)}, confirmed ${f.count(report.confirmed)}${report.load_seconds !== null ? ` in ${f.seconds(report.load_seconds)}` : ""}.`,
    `Joined by ${route.joined_by.replace("_", " ")}.`,
  ];
  if (report.differing_field) said.push(`Namespaces differ in ${report.differing_field}.`);
  if (route.tokens.unhinted) said.push(`${f.count(route.tokens.unhinted)} of the confirmed tokens were not hinted.`);
  return said;
}

const ENDS = { complete: "Completed", cancelled: "Cancelled", worker_lost: "Cut off when the worker was lost", no_worker: "No worker could be given it", error: "Ended in an error" };

function stream(route, observed) {
  if (observed === null) return ["Its end was never published: its router went away."];
  if (observed.end === "advised") return ["A gateway dispatched it by our advice: no token passed through us, so first token and end are not known."];
  const said = [`${word(ENDS, observed.end)} on ${route.served_by ?? "an unknown replica"}: first token after ${f.seconds(observed.ttft_seconds)}${route.ttft_class ? ` (${route.ttft_class})` : ""}, ${f.plural(observed.output_tokens, "token", "tokens")} out.`];
  const saving = route.saving ?? null;
  if (saving !== null && saving.saved_seconds !== null) said.push(`At this replica’s cold rate (${f.count(Math.round(1 / saving.seconds_per_token))} tokens a second) it would have taken ${f.seconds(saving.cold_seconds)}: ${f.seconds(Math.abs(saving.saved_seconds))} ${saving.saved_seconds >= 0 ? "saved" : "lost"}.`);
  if (observed.engine_cached_tokens !== null) said.push(`The engine counts ${f.count(observed.engine_cached_tokens)} cached tokens: ${{ equal: "equal to the report", differs: "not what the report says", unknown: "no report to compare with" }[route.cross_check]}.`);
  return said;
}
