// Starts the chat and the engine's picture, which do not need each other.

import { onKeyNeeded, setKey } from "./api.js";
import { startChat } from "./chat.js";
import { byId } from "./dom.js";
import { followEngine } from "./engine.js";

byId("no-script").hidden = true;
document.querySelector("main").hidden = false;

for (const name of ["chat", "engine"]) {
  byId(`show-${name}`).addEventListener("click", () => {
    document.body.classList.toggle("engine", name === "engine");
    byId("show-chat").setAttribute("aria-pressed", String(name === "chat"));
    byId("show-engine").setAttribute("aria-pressed", String(name === "engine"));
  });
}

const said = { chat: "", engine: "" };

function say(who, text) {
  said[who] = text;
  const all = Object.values(said).filter(Boolean).join(" ");
  if (byId("status").textContent !== all) byId("status").textContent = all;
}

let asking = null;

/** Ask for the key, once for all who want one. */
onKeyNeeded((wasWrong) => {
  asking ||= new Promise((given) => {
    const dialog = byId("key");
    byId("key-why").textContent = wasWrong ? "That key is not the one: give the one of --api-key."
      : "The server was started with --api-key. The key stays in this tab.";
    byId("key-text").value = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      asking = null;
      setKey(byId("key-text").value);
      byId("key-text").value = "";
      given();
    }, { once: true });
  });
  return asking;
});
byId("key").addEventListener("cancel", (event) => event.preventDefault()); // without a key there is nothing

startChat((text) => say("chat", text)).catch((error) => say("chat", `Chat: ${error.message}`));
followEngine((text) => say("engine", text));
