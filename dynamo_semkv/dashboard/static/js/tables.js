// Outcomes, decisions, replicas, recent routes, health.

import { calibration } from "./calibration.js";
import { badge, bar, byId, cell, h, keyed, pairs, reconcile, show } from "./dom.js";
import * as f from "./format.js";
import { heat } from "./heat.js";
import { donorStreams } from "./streams.js";
import { CHECKS, DECISIONS, LOOKUPS, OUTCOMES, REASONS, STANDINGS, word } from "./words.js";

export function tables(s, openRoute) {
  outcomes(s);
  decisions(s);
  heat(s);
  replicas(s);
  calibration(s);
  routes(s, openRoute);
  health(s);
  donorStreams(s);
}

export function outcomeBadge(outcome) {
  const found = word(OUTCOMES, outcome);
  return Array.isArray(found) ? badge(found[0], found[1]) : badge(found, "warn");
}

function outcomes(s) {
  const rows = s.outcomes.map((row) => {
    const part = f.share(row.routes, s.requests);
    const meaning = Object.hasOwn(REASONS, row.reason) ? h("small", {}, REASONS[row.reason]) : null;
    return keyed(
      `${row.outcome} ${row.reason}`,
      h(
        "tr",
        { class: "outcome" },
        cell("Outcome", {}, outcomeBadge(row.outcome)),
        cell("Reason", {}, h("span", {}, h("code", {}, row.reason), meaning)),
        cell("Routes", { class: "num" }, f.count(row.routes)),
        cell("Share", { class: "num" }, h("span", {}, f.percent(part), bar(part, row.outcome.startsWith("materialized") ? "materialized" : "calm"))),
      ),
    );
  });
  reconcile(byId("outcomes"), rows);
  show(byId("outcomes-empty"), rows.length === 0);
  const orphans = s.orphans.reduce((sum, row) => sum + row.reports, 0);
  const checks = s.cross_checks;
  const notes = [];
  if (orphans) notes.push(`${f.plural(orphans, "report", "reports")} belonged to no route (${s.orphans.map((row) => `${row.reason} ${f.count(row.reports)}`).join(", ")}).`);
  if (checks.equal || checks.differs) notes.push(`The engine’s own cached-token count equals the report in ${f.count(checks.equal ?? 0)} routes and differs in ${f.count(checks.differs ?? 0)}.`);
  byId("outcomes-note").textContent = notes.join(" ");
}

function bars(list, rows, total) {
  reconcile(
    list,
    rows.map(([key, name, value]) => keyed(key, h("li", { title: key }, h("div", { class: "line" }, h("span", {}, name), h("span", {}, f.count(value), " ", h("span", { class: "muted" }, f.percent(f.share(value, total))))), bar(f.share(value, total), key === "placed" || key === "hit" ? "placed" : "calm")))),
  );
}

function decisions(s) {
  bars(byId("decisions"), s.decisions.map((row) => [row.reason, word(DECISIONS, row.reason), row.routes]), s.requests);
  show(byId("decisions-empty"), s.decisions.length === 0);
  const lookups = Object.entries(s.lookups).sort((a, b) => b[1] - a[1]);
  bars(byId("lookups"), lookups.map(([name, value]) => [name, word(LOOKUPS, name), value]), s.requests);
  show(byId("lookups-empty"), lookups.length === 0);
  const { routes, agreed } = s.would_have;
  byId("would-have").textContent = routes ? `${f.plural(routes, "route", "routes")} would have been placed by us; Dynamo chose the same replica in ${f.count(agreed)} of them (${f.percent(f.share(agreed, routes))}).` : "";
}

function replicas(s) {
  const placedTotal = s.replicas.reduce((sum, row) => sum + row.placed_tokens, 0);
  const confirmedTotal = s.replicas.reduce((sum, row) => sum + row.confirmed_tokens, 0);
  const rows = s.replicas.map((row) => {
    const standing = row.live ? word(STANDINGS, row.standing) : ["Gone", "calm"];
    const [state, kind] = Array.isArray(standing) ? standing : [standing, "warn"];
    const use = (part, total) => (part === null || part === undefined || !total ? null : bar(part / total, "placed"));
    return keyed(
      `${row.name} ${row.worker_id ?? ""}`,
      h(
        "tr",
        { class: row.live ? null : "gone" },
        cell("Replica", {}, h("span", {}, h("b", {}, row.name), row.worker_id ? h("small", { class: "mono", title: "Changes when the worker starts again" }, `Dynamo instance ${row.worker_id}`) : null)),
        cell("State", {}, h("span", {}, badge(state, kind), row.materialization ? h("small", {}, `loads: ${row.materialization}`) : null, row.differs_in ? h("small", {}, `in ${row.differs_in}`) : null, row.problem ? h("small", {}, row.problem) : null)),
        cell("Placed", { class: "num" }, h("span", {}, f.compact(row.placed_tokens), h("small", {}, f.plural(row.placed_requests, "request", "requests")), bar(f.share(row.placed_tokens, placedTotal), "placed"))),
        cell("Served", { class: "num" }, f.count(row.served_requests)),
        cell("Confirmed", { class: "num" }, h("span", {}, f.compact(row.confirmed_tokens), h("small", {}, "tokens"), bar(f.share(row.confirmed_tokens, confirmedTotal), "materialized"))),
        cell("Declined", { class: "num" }, f.count(row.declined_requests)),
        cell("Queued prefill", { class: "num" }, h("span", {}, f.count(row.queued_prefill_tokens), h("small", {}, row.active_requests === null || row.active_requests === undefined ? "tokens" : f.plural(row.active_requests, "request", "requests")))),
        cell("Device blocks", { class: "num" }, h("span", {}, f.count(row.active_decode_blocks), h("small", {}, `of ${f.count(row.total_blocks)}`), use(row.active_decode_blocks, row.total_blocks))),
        cell("Host slab", { class: "num" }, h("span", {}, f.count(row.resident_blocks), h("small", {}, `of ${f.count(row.slab_blocks)} blocks`), use(row.resident_blocks, row.slab_blocks))),
      ),
    );
  });
  reconcile(byId("replicas"), rows);
  show(byId("replicas-empty"), rows.length === 0);
}

function routes(s, openRoute) {
  const rows = s.recent.map((row) => {
    const button = h("button", { type: "button", class: "linkish mono", "data-route": row.route_id, "aria-label": `Explain route ${row.route_id}` }, row.route_id.slice(0, 8));
    const { evidence, placed, hinted, materialized, unhinted } = row.tokens;
    const moved = row.placed_on && row.served_by && row.placed_on !== row.served_by;
    return keyed(
      row.route_id,
      h(
        "tr",
        { class: "route" },
        cell("Route", {}, h("span", {}, button, h("small", {}, f.time(row.opened_at), row.attempt ? `, attempt ${row.attempt}` : null), s.models.length === 1 && s.models[0] === row.model ? null : h("small", {}, row.model))),
        cell("Closed as", {}, h("span", {}, outcomeBadge(row.outcome), h("small", {}, row.reason))),
        cell("Replica", {}, h("span", {}, row.served_by ?? row.placed_on ?? f.DASH, h("small", {}, moved ? `placed on ${row.placed_on}` : row.placed_on ? "placed" : "Dynamo’s choice"))),
        cell("Evidence → placed → hinted → materialized", { class: "num" }, h("span", {}, [evidence, placed, hinted].map(f.count).join(" → "), " → ", h("b", {}, f.count(materialized)), h("small", {}, `of ${f.count(row.tokens.input)} input`, unhinted ? `; ${f.count(unhinted)} confirmed unhinted` : null))),
        cell("First token", { class: "num" }, h("span", {}, f.seconds(row.ttft_seconds), h("small", {}, row.ttft_class ?? ""))),
      ),
    );
  });
  const body = byId("routes");
  reconcile(body, rows);
  body.onclick = (event) => {
    const button = event.target.closest("button[data-route]");
    if (button) openRoute(button.dataset.route);
  };
  show(byId("routes-box"), rows.length > 0);
  show(byId("routes-empty"), rows.length === 0);
}

const LEVELS = { ok: ["OK", "good"], warn: ["Look", "warn"], fail: ["Fail", "bad"] };

function health(s) {
  const checks = s.readiness.checks.map((check) => {
    const [state, kind] = word(LEVELS, check.level);
    return keyed(check.name, h("li", {}, badge(state, kind), h("span", {}, h("b", {}, word(CHECKS, check.name)), check.detail)));
  });
  reconcile(byId("checks"), checks);
  const { publisher, subscriber, catalog, book } = s;
  const refused = (stream) => stream.malformed + stream.unsupported_version + stream.foreign_subject;
  const link = (stats) => (stats === null ? f.DASH : stats.connected ? "connected" : "away");
  pairs(byId("bus"), [
    ["Publishing", link(publisher)],
    ["Reading", link(subscriber)],
    ["Waiting for the broker", f.count(publisher?.buffered)],
    ["Dropped", f.count(publisher?.dropped)],
    ...s.streams.map((stream) => [`Read: ${stream.name}`, `${f.compact(stream.messages)}${stream.caught_up ? "" : " (catching up)"}${refused(stream) ? `, ${f.count(refused(stream))} refused` : ""}`]),
  ]);
  const streams = catalog.stream_states ?? {};
  pairs(byId("catalog"), [
    ["Donors", f.count(catalog.donors)],
    ["Streams in order", f.count(streams.ok)],
    ["Quarantined", f.count(streams.quarantined)],
    ["Worker gone", f.count(streams.absent)],
  ]);
  const faults = Object.entries(s.fallbacks);
  pairs(byId("book"), [
    ["Routes open", f.count(s.open_routes)],
    ["Reports waiting for a route", f.count(s.held_reports)],
    ["Echoes and replays dropped", f.count(book.duplicates)],
    ["Joined by route id", f.count(s.joined_by.route_id ?? 0)],
    ["Joined by prompt", f.count(s.joined_by.prompt_key ?? 0)],
    ...faults.map(([reason, value]) => [`Fallback: ${reason}`, f.count(value)]),
  ]);
}
