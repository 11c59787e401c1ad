// Keys, theme, live pages and lazily loaded turns. Pages work without it. Only notes write to the server.

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

// Theme: the system's, until one is chosen.
$("#theme")?.addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("rolltap.theme", root.dataset.theme);
  document.dispatchEvent(new Event("themechange"));
});

const keys = $("#keys");
$("#help")?.addEventListener("click", () => keys.showModal());
$("#keys-close")?.addEventListener("click", () => keys.close());

// A row leads where its link leads.
document.addEventListener("click", (event) => {
  const row = event.target.closest("tr[data-href]");
  if (!row || event.target.closest("a, button, summary, input, .pick") || getSelection().toString()) return;
  if (event.metaKey || event.ctrlKey) window.open(row.dataset.href);
  else location.href = row.dataset.href;
});

// Turns that come as one scrolls.
const lazy = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) load(entry.target);
}, { rootMargin: "1200px" });

async function load(place) {
  lazy.unobserve(place);
  try {
    const reply = await fetch(place.dataset.lazy);
    if (!reply.ok) throw new Error(`${reply.status}`);
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    place.replaceWith(...page.body.childNodes);
    watchLazy();
    startFollowing();
    settleOutline();
    offerNotes();
    offerTools();
    if (location.hash.startsWith("#call-") && place.parentElement?.id !== "turns") $(location.hash)?.scrollIntoView();
  } catch (error) {
    place.textContent = `could not be loaded (${error.message}); click to try again`;
    place.onclick = () => load(place);
  }
}

function watchLazy() {
  for (const place of $$("[data-lazy]")) lazy.observe(place);
}
watchLazy();

// Labels, scores, comments and tags, where the browser's link may add them.
let formToken = null;
async function findFormToken() {
  formToken ??= (await (await fetch("/view/form")).json()).token;
}
async function offerNotes() {
  const forms = $$("form[data-note][hidden]");
  if (!forms.length) return;
  await findFormToken();
  if (!formToken) return;
  for (const form of forms) {
    form.hidden = false;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      addNote(form).catch((error) => { $("[role=status]", form).textContent = error.message; });
    });
  }
}

async function addNote(form) {
  const fields = new URLSearchParams(new FormData(form));
  fields.set(`${form.dataset.note}_id`, form.dataset.target);
  const problem = await postNote(fields);
  if (problem) throw new Error(problem);
  location.reload();
}

// Returns what is wrong; nothing if the note was added.
async function postNote(fields) {
  const reply = await fetch(`/view/notes?${fields}`, { method: "POST", headers: { "x-rolltap-form": formToken } });
  if (reply.ok) return "";
  const said = await reply.json().catch(() => ({}));
  return said.error ?? `the server answers ${reply.status}`;
}
offerNotes().catch(() => {});

// Parts of the page that follow the record. A session's page asks for its news only, and adds the calls that came. Other
// pages say which state of the record they show, and get nothing while there is no other; without a state, none can come.
const EVERY_MS = 3000, SELDOM_MS = 30000;
let state = $("meta[name=state]")?.content;

// Returns true if there was something new.
async function follow() {
  if (document.hidden || getSelection().toString()) return false;
  const turns = $("#turns");
  const address = turns ? newsAddress() : state && location.href;
  if (!address) return false;
  const reply = await fetch(address, { cache: "no-store", headers: turns ? {} : { "If-None-Match": state } });
  const text = reply.status === 200 ? await reply.text() : "";
  if (!text) return false;
  const page = new DOMParser().parseFromString(text, "text/html");
  const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 40;
  state = $("meta[name=state]", page)?.content;
  for (const part of $$("[data-live]")) {
    const fresh = $(`[data-live="${part.dataset.live}"]`, page);
    if (fresh) patch(part, fresh);
  }
  document.dispatchEvent(new Event("rolltap:news"));
  if (!turns) return true;
  addTurns(turns, $("#turns", page));
  markTurnInView();
  if (atEnd) scrollTo(0, document.documentElement.scrollHeight);
  return true;
}

// Makes `old` equal to `fresh` where they differ: focus, hover and opened details stay on what did not change.
const READERS = new Set(["open", "aria-current", "data-current"]); // attributes that the reader's acts set
const keyOf = (node) => node.dataset?.href;

function patch(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !READERS.has(name)) old.removeAttribute(name);
  const kept = new Set([...fresh.children].map(keyOf));
  for (const child of [...old.children]) if (!kept.has(keyOf(child))) child.remove();
  const mates = new Map([...old.children].map((child) => [keyOf(child), child]));
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  let at = old.firstChild;
  for (const wanted of [...fresh.childNodes]) {
    const alike = at && !keyOf(at) && at.nodeName === wanted.nodeName ? at : null;
    const mate = keyOf(wanted) ? mates.get(keyOf(wanted)) : alike;
    if (mate) patch(mate, wanted);
    if (mate !== at || !mate) old.insertBefore(mate ?? wanted, at);
    else at = at.nextSibling;
  }
  while (at) { const next = at.nextSibling; at.remove(); at = next; }
  if (focused !== document.activeElement) focused?.focus({ preventScroll: true });
}

// The turns from the first that was still open when it came; none where the session is over.
function newsAddress() {
  const place = $("[data-news]");
  const shown = $$("[data-turn]");
  const open = shown.find((turn) => "open" in turn.dataset);
  const from = open ? turnNumber(open) - 1 : shown.length ? turnNumber(shown.at(-1)) : 0;
  return place ? `${place.dataset.news}&from=${from}` : "";
}

function turnNumber(turn) {
  return Number(turn.id.replace("call-", ""));
}

function addTurns(turns, fresh) {
  for (const turn of $$("[data-turn]", fresh)) document.getElementById(turn.id)?.replaceWith(turn);
  if ($(".lazy", turns)) return; // what comes after is loaded as one scrolls there
  $(".empty", turns)?.remove();
  turns.append(...fresh.childNodes);
  watchLazy();
}

function offerTools() {
  if ($("#tools-bar")) $("#tools-bar").hidden = false;
}
offerTools();

let following = false, wait = EVERY_MS, timer = 0;
async function keepFollowing() {
  const began = performance.now();
  const news = await follow().catch(() => false);
  wait = news ? EVERY_MS : Math.min(SELDOM_MS, wait * 1.5);
  if (!canFollow()) return;
  // After the answer, and the later the longer it took: a slow server is not kept busy.
  timer = setTimeout(keepFollowing, Math.max(wait, 4 * (performance.now() - began)));
}
function canFollow() {
  return $("[data-live]") && ($("#turns") ? newsAddress() : state);
}
function startFollowing() {
  if (following || !canFollow()) return;
  following = true;
  timer = setTimeout(keepFollowing, EVERY_MS);
}
startFollowing();
document.addEventListener("visibilitychange", () => {
  if (document.hidden || !following || !canFollow()) return;
  clearTimeout(timer);
  wait = EVERY_MS;
  keepFollowing();
});

// How long ago: the server says it once, this goes on.
const UNITS = [[60, 1, "s"], [3600, 60, "min"], [86400, 3600, "h"], [5184000, 86400, "d"]];
function tellTimes() {
  for (const time of $$("time[data-at]")) {
    const age = Date.now() / 1000 - Number(time.dataset.at);
    const unit = UNITS.find(([limit]) => age < limit);
    if (unit && age >= 10) time.textContent = `${Math.round(age / unit[1])} ${unit[2]} ago`;
  }
}
setInterval(tellTimes, 15000);

// A link one level up goes back to the list as it was: with its words, conditions and page.
const LISTS = ["/view/", "/view/groups", "/view/runs"];
try {
  if (LISTS.includes(location.pathname)) sessionStorage.setItem(`rolltap.list ${location.pathname}`, location.search);
  for (const link of $$("a[rel=up]")) {
    const kept = LISTS.includes(link.getAttribute("href")) && sessionStorage.getItem(`rolltap.list ${link.pathname}`);
    if (kept) link.search = kept;
  }
} catch { /* a browser without storage goes to the whole list */ }

// Named filters of the list: this browser keeps them, each as the list's address without its page.
const saved = $("#saved"), save = $("#save");
const SAVED = "rolltap.filters";
const savedFilters = () => new Map(Object.entries(JSON.parse(localStorage.getItem(SAVED) ?? "{}")));
function shownFilter() {
  const query = new URLSearchParams([...new URLSearchParams(location.search)].filter(([name, value]) => value && name !== "offset"));
  if (query.get("sort") === "created_at" && !query.has("order")) query.delete("sort");
  return `${query}`;
}
function keepFilters(filters) {
  localStorage.setItem(SAVED, JSON.stringify(Object.fromEntries(filters)));
  showFilters();
}
function showFilters() {
  const filters = savedFilters(), now = shownFilter();
  $("ul", saved).replaceChildren(...[...filters].sort().map(([name, query]) => {
    const item = document.createElement("li"), link = document.createElement("a"), remove = document.createElement("button");
    link.href = `/view/?${query}`;
    link.textContent = name;
    if (query === now) link.setAttribute("aria-current", "true");
    remove.type = "button";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Forget the filter ${name}`);
    remove.addEventListener("click", () => { filters.delete(name); keepFilters(filters); });
    item.append(link, remove);
    return item;
  }));
  saved.hidden = !filters.size;
  if (save) save.hidden = [...filters.values()].includes(now);
}
save?.addEventListener("submit", (event) => {
  event.preventDefault();
  const name = save.elements.name.value.trim();
  if (name) keepFilters(savedFilters().set(name, shownFilter()));
});
try {
  if (saved) showFilters();
} catch { /* a browser without storage keeps none */ }

// A call's prompt, sampled again from the policy as it is now, beside what was sampled then.
const replay = $("#replay");
async function offerReplay() {
  await findFormToken();
  replay.hidden = !formToken;
}
if (replay) offerReplay().catch(() => {});
replay?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const fields = new URLSearchParams([...new FormData(replay)].filter(([, value]) => value !== "")), said = $("[role=status]", replay);
  fields.set("call_id", replay.dataset.call);
  said.textContent = "sampling …";
  const reply = await fetch(`/view/replays?${fields}`, { method: "POST", headers: { "x-rolltap-form": formToken } });
  const answer = await reply.json().catch(() => ({}));
  said.textContent = reply.ok ? "" : answer.error ?? `the server answers ${reply.status}`;
  if (!reply.ok) return;
  const figures = (each) => [`${each.tokens} tokens`, each.finish, each.logprob === null ? "" : `mean log-prob ${each.logprob.toFixed(3)}`, `version ${each.version}`].filter(Boolean).join(", ");
  const lanes = answer.samples.map((each, at) => lane(`now, sample ${at + 1}`, figures(each), each.text));
  $("#replayed").replaceChildren(lane("then", "as recorded", answer.then), ...lanes);
});

function lane(title, figures, text) {
  const section = document.createElement("section"), head = document.createElement("header"), note = document.createElement("span"), body = document.createElement("pre");
  section.className = "panel";
  head.textContent = title;
  note.className = "dim";
  note.textContent = figures;
  body.className = "pad";
  body.textContent = text;
  head.append(note);
  section.append(head, body);
  return section;
}

// Rows that are picked, for notes and files.
const picked = $("#picked");
const boxes = () => $$("input[name=picked]");
function showPicked() {
  if (!picked) return;
  const ids = boxes().filter((box) => box.checked).map((box) => box.value);
  picked.hidden = !ids.length;
  $("#picked-count").textContent = `${ids.length} selected`;
  $("#pick-all") && ($("#pick-all").checked = ids.length > 0 && ids.length === boxes().length);
  const query = new URLSearchParams(ids.map((id) => ["picked", id]));
  $("#picked-ids").search = query;
  query.set("format", $("#picked-format").value);
  $("#picked-dataset").search = query;
  $("#picked-diff").hidden = ids.length !== 2;
  if (ids.length === 2) $("#picked-diff").search = new URLSearchParams({ first: ids[1], second: ids[0] });
  return ids;
}
picked?.addEventListener("submit", async (event) => {
  event.preventDefault();
  const ids = showPicked(), fields = new URLSearchParams(new FormData(picked)), said = $("#picked-said");
  for (const [at, id] of ids.entries()) {
    said.textContent = `${at + 1} of ${ids.length}`;
    fields.set("session_id", id);
    const problem = await postNote(fields).catch((error) => error.message);
    if (problem) return void (said.textContent = problem);
  }
  location.reload();
});
$("#picked-none")?.addEventListener("click", () => { for (const box of boxes()) box.checked = false; showPicked(); });
document.addEventListener("change", (event) => {
  if (event.target.id === "pick-all") for (const box of boxes()) box.checked = event.target.checked;
  if (event.target.closest?.(".pick, #picked")) showPicked();
  if (event.target.closest?.(".pick")) offerPickedNotes().catch(() => {});
});
document.addEventListener("rolltap:news", showPicked);
async function offerPickedNotes() {
  await findFormToken();
  $("#picked-notes").hidden = !formToken;
}
showPicked();

// The outline marks the turn in view.
const narrow = matchMedia("(max-width: 860px)"); // wide screens have no summary to unfold it by
const folding = () => $$("#outline, #facets");
narrow.addEventListener("change", () => { for (const one of folding()) one.open = !narrow.matches; });
function settleOutline() {
  if (narrow.matches) for (const one of folding()) one.open = false;
  $(".outline [aria-current]")?.scrollIntoView({ block: "center" });
}
settleOutline();

function turnInView() {
  const turns = $$("[data-turn]");
  return turns.filter((turn) => turn.getBoundingClientRect().top < 120).at(-1) ?? turns[0];
}

function markTurnInView() {
  const turn = turnInView();
  const entry = turn && $(`.outline a[data-call="${turnNumber(turn)}"]`);
  const marked = $(".outline [aria-current]");
  if (!entry || entry === marked) return;
  marked?.removeAttribute("aria-current");
  entry.setAttribute("aria-current", "true");
  entry.scrollIntoView({ block: "nearest" });
}

let ticking = false;
document.addEventListener("scroll", () => {
  if (ticking || !$("#turns")) return;
  ticking = true;
  requestAnimationFrame(() => {
    ticking = false;
    markTurnInView();
  });
}, { passive: true });

// Outline links stay on the page while their turn is on it.
document.addEventListener("click", (event) => {
  const number = event.target.closest(".outline a[data-call]")?.dataset.call;
  const turn = number && $("#turns") && document.getElementById(`call-${number}`);
  if (!turn) return;
  event.preventDefault();
  turn.scrollIntoView();
  history.replaceState(null, "", `#call-${number}`);
});

// Keys.
function step(by) {
  const rows = $$("tr[data-href]");
  if (rows.length) {
    const at = rows.findIndex((row) => "current" in row.dataset);
    const next = rows[Math.min(rows.length - 1, Math.max(0, at + by))];
    delete rows[at]?.dataset.current;
    next.dataset.current = "";
    next.scrollIntoView({ block: "nearest" });
    return;
  }
  if ($("#turns")) {
    const turns = $$("[data-turn]");
    const at = turns.indexOf(turnInView());
    turns[Math.min(turns.length - 1, Math.max(0, at + by))]?.scrollIntoView();
    return;
  }
  $(by > 0 ? "a[rel=next]" : "a[rel=prev]")?.click();
}

let before = "";
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || keys?.open) return;
  if (event.target.matches("input:not([type=checkbox]), select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const pages = { s: "/view/", g: "/view/groups", r: "/view/runs" };
  if (before === "g" && pages[event.key]) {
    location.href = pages[event.key];
    return;
  }
  before = event.key;
  const act = {
    j: () => step(1),
    k: () => step(-1),
    n: () => $("a[rel=next]")?.click(),
    p: () => $("a[rel=prev]")?.click(),
    u: () => $("a[rel=up]")?.click(),
    t: () => { const href = turnInView()?.dataset.tokens; if (href) location.href = href; },
    b: nextBreak,
    e: nextError,
    f: () => { if ($("#turns")) fold(); },
    l: () => { const place = $("form[data-note]:not([hidden]) input[name=name]"); if (place) { event.preventDefault(); place.focus(); } },
    "/": () => $("input[type=search]")?.focus(),
    "?": () => keys?.showModal(),
    v: () => { const box = $("tr[data-current] input[name=picked]"); if (box) box.click(); },
    Enter: () => { const row = $("tr[data-current]"); if (row && !document.activeElement.closest("a, button, summary")) location.href = row.dataset.href; },
  }[event.key];
  if (!act) return;
  if (event.key === "/" || event.key === "?") event.preventDefault();
  act();
});

// To the next of what is marked below the middle of the window; after the last to the first.
function goToNext(selector, what) {
  const found = $$(selector), below = innerHeight / 2 + 8;
  const next = found.find((one) => one.getBoundingClientRect().top > below) ?? found[0];
  next?.scrollIntoView({ block: "center" });
  if ($("#said")) $("#said").textContent = next ? "" : `no ${what} ${$("#turns .lazy") ? "so far: more calls are loaded as you scroll" : "in this session"}`;
}
const nextBreak = () => goToNext("[data-break]", "break");
const nextError = () => goToNext("#turns .message.error, #turns .turn > header .chip.bad", "error");

function fold() {
  const folded = $("#turns")?.classList.toggle("folded");
  $("#fold")?.setAttribute("aria-pressed", String(folded));
}
document.addEventListener("click", (event) => {
  const act = { fold, "next-error": nextError, "next-break": nextBreak }[event.target.id];
  if (act) act();
  const copied = event.target.closest("[data-copy]");
  if (copied) copy(copied).catch(() => { copied.textContent = "can't copy"; });
});

async function copy(button) {
  const body = $(".body", button.closest(".message"));
  for (const details of $$("details", body)) details.open = true; // what is folded has no text to copy
  const text = body.innerText || body.textContent;
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else getSelection().selectAllChildren(body); // without HTTPS: it is selected, to be copied by the keyboard
  button.textContent = navigator.clipboard ? "copied" : "selected";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}
