// The frame: sections by hash, one view at a time, refreshed when the service says that something changed.

import { follow, get } from "./api.js";
import { deviceView, devicesView, nodeView } from "./devices.js";
import { empty, h } from "./dom.js";
import { eventsView } from "./events.js";
import { fleetView } from "./fleet.js";
import { jobsView } from "./jobs.js";
import { alertsView, deliveriesView, modelsView } from "./operations.js";

const SECTIONS = [
  ["", "Fleet", fleetView],
  ["devices", "Devices", devicesView],
  ["jobs", "Jobs", jobsView],
  ["alerts", "Alerts", alertsView],
  ["events", "Events", eventsView],
  ["deliveries", "Deliveries", deliveriesView],
  ["models", "Models", modelsView],
];
const LEAST_BETWEEN_MS = 700;
const SLOW_REFRESH_MS = 10000;
const LIVE_WORDS = { live: "Live", polling: "Polling every 5 s", lost: "Service does not answer" };

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const live = document.getElementById("live");
let view = null;
let state = "polling";
let timer = 0;
let lastAt = 0;
let running = false;
let again = false;

function route() {
  const [section, subject] = location.hash.replace(/^#\/?/, "").split(/\/(.*)/s);
  if (view && view.close) view.close();
  main.replaceChildren();
  main.setAttribute("aria-busy", "true");
  const id = subject ? decodeURIComponent(subject) : "";
  if (section === "device" && id) view = deviceView(main, id);
  else if (section === "node" && id) view = nodeView(main, id);
  else {
    const found = SECTIONS.find(([name]) => name === section);
    if (found) view = found[2](main);
    else {
      view = null;
      main.append(empty("There is no such page."));
    }
  }
  const owner = section === "device" || section === "node" ? "devices" : section;
  for (const link of nav.children) {
    if (link.dataset.section === owner) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = [id || (SECTIONS.find(([name]) => name === section) || ["", ""])[1], "Forewarn"].filter(Boolean).join(" · ");
  scrollTo(0, 0);
  refresh();
}

async function refresh() {
  if (running) {
    again = true;
    return;
  }
  running = true;
  lastAt = Date.now();
  const shown = view;
  try {
    if (shown) await shown.refresh();
    if (shown === view) main.removeAttribute("aria-busy");
    tell(state === "lost" ? "polling" : state);
    main.querySelector(".trouble")?.remove();
  } catch (error) {
    if (shown === view) trouble(error);
  } finally {
    running = false;
    if (again) {
      again = false;
      soon();
    }
  }
  count();
}

function trouble(error) {
  main.removeAttribute("aria-busy");
  if (error.status === 0) tell("lost");
  const text = error.status === 0 ? "The service does not answer. What is shown may be old; it is asked again every few seconds." : error.status === 404 ? "The service knows nothing of this." : error.message;
  const box = main.querySelector(".trouble") || h("p", { class: "trouble", role: "alert" });
  box.textContent = text;
  main.prepend(box);
}

// Many changes at once are one refresh; a hidden tab waits until it is looked at.
function soon() {
  if (document.hidden || timer) return;
  timer = setTimeout(
    () => {
      timer = 0;
      refresh();
    },
    Math.max(50, LEAST_BETWEEN_MS - (Date.now() - lastAt)),
  );
}

function tell(next) {
  state = next;
  live.dataset.state = state;
  live.textContent = LIVE_WORDS[state];
}

let countedAt = 0;
async function count() {
  if (Date.now() - countedAt < 3000) return;
  countedAt = Date.now();
  try {
    const open = ((await get("v1/alerts", { limit: 200 })).items || []).filter((item) => !item.resolved && !item.acknowledged).length;
    const link = [...nav.children].find((child) => child.dataset.section === "alerts");
    link.replaceChildren("Alerts", open ? h("span", { class: "count", "aria-label": `${open} open` }, String(open)) : "");
  } catch {
    // The view itself says what is wrong.
  }
}

nav.append(...SECTIONS.map(([name, title]) => h("a", { href: `#/${name}`, "data-section": name }, title)));
addEventListener("hashchange", () => {
  route();
  main.focus({ preventScroll: true });
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the hash is the route
  main.focus();
});
document.addEventListener("visibilitychange", soon);
follow(soon, (next) => {
  if (state !== "lost" || next === "live") tell(next);
});
setInterval(soon, SLOW_REFRESH_MS);
tell("polling");
route();
