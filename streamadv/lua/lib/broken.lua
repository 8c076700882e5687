-- End a group whose hash somebody has overwritten: what can still be read of its members is dead. Returns what end_group returns.
local function end_broken(id, policy)
  note_malformed('group:' .. id, 'hash', 'size, slots or counters are not what was written', '')
  return end_group(id, 'malformed', 'e', policy)
end
