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
  if (!row || event.target.closest("a, button, summary") || getSelection().toString()) return;
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
async function offerNotes() {
  const forms = $$("form[data-note][hidden]");
  if (!forms.length) return;
  formToken ??= (await (await fetch("/view/form")).json()).token;
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
  const reply = await fetch(`${form.getAttribute("action")}?${fields}`, { method: "POST", headers: { "x-rolltap-form": formToken } });
  if (!reply.ok) {
    const said = await reply.json().catch(() => ({}));
    throw new Error(said.error ?? `the server answers ${reply.status}`);
  }
  location.reload();
}
offerNotes().catch(() => {});

// Parts of the page that follow the record. A session's page asks for its news only, and adds the calls that came.
const EVERY_MS = 3000;
async function follow() {
  if (document.hidden || getSelection().toString()) return;
  const turns = $("#turns");
  const address = turns ? newsAddress() : location.href;
  const reply = address && await fetch(address);
  const text = reply?.ok ? await reply.text() : "";
  if (!text) return;
  const page = new DOMParser().parseFromString(text, "text/html");
  const atEnd = innerHeight + scrollY >= document.documentElement.scrollHeight - 40;
  for (const part of $$("[data-live]")) {
    const fresh = $(`[data-live="${part.dataset.live}"]`, page);
    if (fresh) patch(part, fresh);
  }
  if (!turns) return;
  addTurns(turns, $("#turns", page));
  markTurnInView();
  if (atEnd) scrollTo(0, document.documentElement.scrollHeight);
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

let following = false;
async function keepFollowing() {
  const began = performance.now();
  await follow().catch(() => {});
  // After the answer, and the later the longer it took: a slow server is not kept busy.
  setTimeout(keepFollowing, Math.max(EVERY_MS, 4 * (performance.now() - began)));
}
function startFollowing() {
  if (following || !$("[data-live]")) return;
  following = true;
  setTimeout(keepFollowing, EVERY_MS);
}
startFollowing();

// The outline marks the turn in view.
const narrow = matchMedia("(max-width: 860px)"); // wide screens have no summary to unfold it by
narrow.addEventListener("change", () => { if ($("#outline")) $("#outline").open = !narrow.matches; });
function settleOutline() {
  if (narrow.matches && $("#outline")) $("#outline").open = false;
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
  if (event.target.matches("input, select, textarea")) {
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
    b: () => nextBreak(),
    l: () => { const place = $("form[data-note]:not([hidden]) input[name=name]"); if (place) { event.preventDefault(); place.focus(); } },
    "/": () => $("input[type=search]")?.focus(),
    "?": () => keys?.showModal(),
    Enter: () => { const row = $("tr[data-current]"); if (row && document.activeElement === document.body) location.href = row.dataset.href; },
  }[event.key];
  if (!act) return;
  if (event.key === "/" || event.key === "?") event.preventDefault();
  act();
});

function nextBreak() {
  const breaks = $$("[data-break]");
  const next = breaks.find((one) => one.getBoundingClientRect().top > 130) ?? breaks[0];
  next?.scrollIntoView({ block: "center" });
}
