// Snapshots in, page out. The stream reconnects by itself; while it is away the page says how old its numbers are.

import { course, redrawCourse, startCourse } from "./course.js";
import { byId, show } from "./dom.js";
import * as f from "./format.js";
import { overview } from "./overview.js";
import { openRoute, startRoute } from "./route.js";
import { tables } from "./tables.js";
import { startTheme } from "./theme.js";

const STALE_MILLISECONDS = 6000;
let last = null;
let arrived = 0;

function render(snapshot) {
  last = snapshot;
  arrived = Date.now();
  overview(snapshot);
  tables(snapshot, openRoute);
  course(snapshot);
  document.documentElement.dataset.now = snapshot.now;
  link();
}

/** Live, or since when not: said in words, and only when it changes. */
function link() {
  const age = Date.now() - arrived;
  const live = last !== null && age < STALE_MILLISECONDS;
  const text = live ? "Live" : last === null ? "Connecting…" : `No news since ${f.time(arrived / 1000)}`;
  const element = byId("link");
  if (element.textContent !== text) {
    element.textContent = text;
    element.className = `badge ${live ? "good" : "warn"}`;
  }
  document.body.classList.toggle("stale", last !== null && !live);
}

function listen() {
  const stream = new EventSource("/api/stream");
  stream.addEventListener("snapshot", (event) => {
    try {
      render(JSON.parse(event.data));
    } catch (error) {
      const notice = byId("notice");
      show(notice, true);
      notice.textContent = `This page cannot show what the router sent: ${error.message}. Reload it; if that does not help, see /api/snapshot.`;
    }
  });
  stream.addEventListener("error", () => {
    // A refused stream (no token any more, too many watchers) is closed for good by the browser: try again, slowly.
    if (stream.readyState === EventSource.CLOSED) setTimeout(listen, 5000);
    link();
  });
}

startTheme(redrawCourse);
startCourse();
startRoute();
listen();
setInterval(link, 1000);
