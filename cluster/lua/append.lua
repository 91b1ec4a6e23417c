-- Store segments and ends: a field per (attempt, turn) and one per (attempt, end), set if absent.
-- Keys: group:<id> hash (read), trajectory:<id> hash, groups set (read), ledger hash, news stream.
-- ARGV: notices to keep (0: write none), then 7 per record: group, trajectory, attempt, field, bytes, final state or "", reason
-- Returns how many were new, then "group attempt" of each record whose order is not known here.
-- Duplicates, older attempts and members that are not pending are ignored.
local new, unordered, kept = 0, {}, tonumber(ARGV[1])
local current = {} -- group -> attempt, -1 once it is deleted, false if it was never admitted
for i = 2, #ARGV, 7 do
  local group, id, attempt, field = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3]
  if current[group] == nil then
    local found = call('HGET', key('group', group), 'attempt')
    if found then
      current[group] = tonumber(found)
    else
      current[group] = call('SISMEMBER', base .. 'groups', group) == 1 and -1
    end
  end
  local known = current[group]
  if not known or (known >= 0 and attempt > known) then
    unordered[#unordered + 1] = group .. ' attempt ' .. attempt
  elseif known == attempt then
    local hash = key('trajectory', id)
    local facts = call('HMGET', hash, 'state', 'group')
    if facts[1] == 'pending' and facts[2] == group
      and call('HSETNX', hash, field, ARGV[i + 4]) == 1 then
      new = new + 1
      if ARGV[i + 5] ~= '' then
        move(id, ARGV[i + 5], ARGV[i + 6])
        for _, name in ipairs(call('HKEYS', hash)) do -- nobody will train on these turns
          if string.sub(name, 1, 5) == 'turn:' then call('HDEL', hash, name) end
        end
      end
      if kept > 0 then
        call('XADD', base .. 'news', 'MAXLEN', '~', kept, '*', 'trajectory', id, 'field', field)
      end
    end
  end
end
return { new, unordered }
