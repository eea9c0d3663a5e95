// Header, tiles, funnel, first-token times.

import { badge, bar, byId, h, keyed, reconcile, show } from "./dom.js";
import * as f from "./format.js";
import { DYNAMO, MODES, STEPS, TTFT, word } from "./words.js";

const READY = { ready: ["Ready", "good"], degraded: ["Degraded", "warn"], not_ready: ["Not ready", "bad"] };

export function overview(s) {
  header(s);
  tiles(s);
  funnel(s);
  dynamo(s);
  ttft(s);
}

function header(s) {
  const [state, kind] = word(READY, s.readiness.state);
  const mode = s.mode === "canary" ? `canary ${s.canary_percent} %` : s.mode;
  const acts = s.mode === "enforce" || s.mode === "canary";
  const fact = (name, value, title) => keyed(name, h("span", { class: "fact", title }, h("span", {}, name), h("span", {}, value)));
  reconcile(byId("facts"), [
    fact("Mode", badge(mode, acts ? "good" : "calm"), `${s.mode}: ${word(MODES, s.mode)}`),
    fact("Router", badge(state, kind)),
    fact("Model", s.models.length ? s.models.join(", ") : f.DASH),
    fact("Config", h("code", {}, s.config_hash || f.DASH), "Hash of the configuration"),
  ]);
  const notice = byId("notice");
  const failing = s.readiness.checks.filter((check) => check.level === "fail");
  const served = s.replicas.some((row) => row.live) ? " Requests are served meanwhile, with Dynamo’s own choices." : "";
  show(notice, failing.length > 0);
  notice.textContent = failing.length ? `Not ready: ${failing.map((check) => check.detail).join("; ")}.${served}` : "";
  byId("foot").textContent =
    `${s.router} · dynamo-semkv ${s.version} · up ${f.duration(s.uptime_seconds)} · ` +
    (s.since === null ? "no route yet" : `routes since ${f.time(s.since)}`) +
    ` · ${f.plural(s.open_routes, "route", "routes")} open · the record keeps the last ${f.count(s.history_size)}`;
}

const step = (s, name) => s.funnel.find((row) => row.step === name);
const outcome = (s, ...names) => s.outcomes.filter((row) => names.includes(row.outcome)).reduce((sum, row) => sum + row.routes, 0);
const median = (s, name) => s.ttft.find((row) => row.class === name)?.median_seconds ?? null;

function tiles(s) {
  const materialized = step(s, "materialized");
  const placed = step(s, "placed");
  const lost = placed.tokens - materialized.tokens;
  const [cold, loaded] = [median(s, "cold"), median(s, "loaded")];
  const unconfirmed = outcome(s, "unconfirmed");
  const unhinted = s.beside.unhinted_tokens;
  const acts = s.mode === "enforce" || s.mode === "canary";
  const confirmed = `${f.count(materialized.tokens)} hinted tokens confirmed by the backend, ${f.count(step(s, "beyond_dynamo").tokens)} of them where Dynamo’s own router would not have sent the request` + (unhinted ? `; ${f.count(unhinted)} more without a hint` : "");
  const tile = (name, big, unit, text) =>
    keyed(name, h("article", { class: "tile" }, h("h2", {}, name), h("p", { class: "big" }, big, unit ? h("small", {}, ` ${unit}`) : null), h("p", {}, text)));
  reconcile(byId("tiles"), [
    tile("Materialized", f.percent(materialized.share), "of input", confirmed),
    acts || !s.would_have.routes ? tile("Placed, not materialized", f.percent(f.share(lost, placed.tokens)), "of placed", `${f.count(lost)} tokens: a placement is not reuse`) : tile("Would have been placed", f.percent(s.would_have.share), "of input", `${f.count(s.would_have.tokens)} tokens; Dynamo chose the same replica in ${f.percent(f.share(s.would_have.agreed, s.would_have.routes))} of the routes`),
    tile(
      "Loaded against cold",
      cold && loaded ? `${(cold / loaded).toFixed(1)}×` : f.DASH,
      cold && loaded ? (loaded <= cold ? "faster" : "the time of loaded") : "",
      `first token ${f.seconds(loaded)} loaded, ${f.seconds(cold)} cold`,
    ),
    tile("Unconfirmed", f.percent(f.share(unconfirmed, s.requests)), "of routes", `${f.count(unconfirmed)} of ${f.plural(s.requests, "route", "routes")} without a report`),
  ]);
}

function funnel(s) {
  byId("funnel-note").textContent = s.requests ? `${f.plural(s.requests, "route", "routes")}; every share is of input` : "Waiting for the first route to close";
  let before = null;
  const rows = s.funnel.map((row) => {
    const [name, meaning] = word(STEPS, row.step);
    const kept = before && before.step !== "input" ? f.share(row.tokens, before.tokens) : null;
    const last = row.step === "materialized" ? " last" : "";
    const element = h(
      "li",
      { class: `step${last}`, "data-step": row.step, "data-tokens": row.tokens },
      h("span", { class: "name" }, name),
      bar(row.share, row.step === "beyond_dynamo" ? "materialized" : row.step),
      h("span", { class: "numbers" }, h("b", {}, f.count(row.tokens)), " ", h("span", { class: "pct" }, f.percent(row.share))),
      h("span", { class: "why" }, meaning, kept === null ? null : `; ${f.percent(kept)} of ${word(STEPS, before.step)[0].toLowerCase()}`, row.step === "input" ? null : `, ${f.plural(row.requests, "request", "requests")}`),
    );
    before = row;
    return keyed(row.step, element);
  });
  const { would_have: would } = s;
  if (would.routes) {
    const element = h(
      "li",
      { class: "step would", "data-step": "would_have" },
      h("span", { class: "name" }, "Would have placed"),
      bar(would.share, "placed"),
      h("span", { class: "numbers" }, h("b", {}, f.count(would.tokens)), " ", h("span", { class: "pct" }, f.percent(would.share))),
      h("span", { class: "why" }, `Chosen and not acted on, in ${f.plural(would.routes, "request", "requests")}; Dynamo sent ${f.count(would.agreed)} of them to the same replica`),
    );
    rows.splice(2, 0, keyed("would_have", element));
  }
  reconcile(byId("funnel"), rows);
  const beside = [
    ["Confirmed without a hint", s.beside.unhinted_tokens, "Host-tier blocks that Dynamo’s own placement met; real reuse, no success of a hint"],
    ["On device by Dynamo’s index", s.beside.exact_device_tokens, "Exact overlap on the device, which needs no donor"],
    ["In host tier by Dynamo’s index", s.beside.exact_host_tokens, "Exact overlap beyond the device"],
    ["Reused locally by engines", s.beside.local_tokens, "What the engines’ own caches held, as reported"],
  ];
  reconcile(byId("beside"), beside.map(([name, tokens, title]) => keyed(name, h("div", { title }, h("dt", {}, name), h("dd", {}, f.count(tokens))))));
}

function dynamo(s) {
  const found = s.dynamo;
  const rows = (found?.steps ?? []).map((row) => {
    const [name, meaning] = word(DYNAMO, row.step);
    return keyed(
      row.step,
      h(
        "li",
        { "data-dynamo": row.step },
        h("div", { class: "line" }, h("span", { class: "name" }, name), h("span", { class: "numbers" }, f.count(row.tokens), " ", h("b", {}, f.percent(row.share)))),
        bar(row.share, "input"),
        h("p", { class: "muted small" }, meaning),
      ),
    );
  });
  reconcile(byId("dynamo"), rows);
  byId("dynamo-note").textContent = found
    ? `Of ${f.count(found.input_tokens)} prompt tokens that this router sent since its start. The funnel is of all routers, since the oldest record; over its routes engines count ${f.count(s.beside.engine_cached_tokens)} cached tokens (${f.percent(f.share(s.beside.engine_cached_tokens, s.funnel[0].tokens))}).`
    : "Not known: Dynamo’s status server is off (DYN_SYSTEM_PORT), or nothing was routed yet.";
}

function ttft(s) {
  const slowest = Math.max(...s.ttft.map((row) => row.median_seconds ?? 0));
  const rows = s.ttft.map((row) => {
    const [name, meaning] = word(TTFT, row.class);
    return keyed(
      row.class,
      h(
        "li",
        { "data-class": row.class },
        h("div", { class: "line" }, h("span", {}, h("span", { class: "name" }, name), " ", h("span", { class: "muted small" }, meaning)), h("b", {}, f.seconds(row.median_seconds))),
        bar(f.share(row.median_seconds, slowest), { cold: "input", warm: "placed", loaded: "materialized" }[row.class]),
        h("p", { class: "muted small" }, row.count ? `95 % within ${f.seconds(row.p95_seconds)}; ${f.plural(row.count, "route", "routes")}` : "no route yet"),
      ),
    );
  });
  reconcile(byId("ttft"), rows);
  const [cold, loaded, warm] = ["cold", "loaded", "warm"].map((name) => median(s, name));
  let verdict = "Compares routes of which more than half, or less than a tenth, of the prompt was reused.";
  if (cold && loaded) {
    verdict = loaded < cold ? `Loading from the host is ${(cold / loaded).toFixed(1)} times as fast as a cold prefill` : "Loading from the host is not faster than a cold prefill";
    verdict += warm ? `; device-warm is ${(cold / warm).toFixed(1)} times as fast.` : ".";
  }
  byId("ttft-verdict").textContent = verdict;
}
