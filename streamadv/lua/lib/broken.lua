-- End a group whose hash somebody has overwritten: what can still be read of its members is dead. Returns what end_group returns.
-- KEYS  ledger, malformed
-- include malformed
local function end_broken(group, policy)
  note_malformed('group:' .. group.id, 'hash', 'head or slots are not what was written', '')
  group.has_fields = true
  return end_group(group, 'malformed', 'e', policy)
end
